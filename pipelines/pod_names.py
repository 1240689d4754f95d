"""Names that the pipeline, the launcher and the manifests share: what every pod of ours gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from steadytrain.components.shared.config.parameters import PARAMETERS

Pipeline = Literal["finetune", "retrain", "tune", "cross-validate", "automl"]
"""Names of the pipelines."""

_DEFAULTS = {item.name: item.default for item in PARAMETERS}
MOUNT_PATH: Final = str(_DEFAULTS["output"])
"""Where every step mounts the shared volume. Also the default output folder on a cluster."""

NAME: Final = str(_DEFAULTS["volume"])
"""Name of the Secret, and of the volume's claim unless the run names another one."""

_S3 = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL",
)
_HUB = ("HF_TOKEN",)
TRACKING: Final = (
    "MLFLOW_TRACKING_URI",
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
)
# MLflow may keep its artifacts in S3 and let its clients write there directly.
_ARTIFACTS = (*TRACKING, *_S3)

STEP_SECRETS: Final[Mapping[str, tuple[str, ...]]] = {
    "detect-change": (*_ARTIFACTS, *_HUB),
    # Stores the address of the pipeline run in the MLflow run.
    "preprocess": (*_ARTIFACTS, *_HUB, "KF_PIPELINES_UI_ENDPOINT"),
    # The training pods get the same keys as these steps, except for the webhook's, which these
    # steps call for alerts.
    "train": (*_ARTIFACTS, *_HUB, "STEADYTRAIN_WEBHOOK_URL"),
    "tune": (*_ARTIFACTS, *_HUB),
    "search": _ARTIFACTS,
    # The first step of its pipeline, as preprocess is of the others.
    "cross-validate": (*_ARTIFACTS, *_HUB, "KF_PIPELINES_UI_ENDPOINT"),
    "train-winner": (*_ARTIFACTS, *_HUB, "STEADYTRAIN_WEBHOOK_URL"),
    "evaluate-and-register": _ARTIFACTS,
    "evaluate": _ARTIFACTS,
    "register": _ARTIFACTS,
    "promote": _ARTIFACTS,
    # Resubmits a run that lost a step, and calls the webhook.
    "report": (
        *_ARTIFACTS,
        "KF_PIPELINES_ENDPOINT",
        "KF_PIPELINES_UI_ENDPOINT",
        "STEADYTRAIN_WEBHOOK_URL",
    ),
}
"""Keys of the Secret that each step gets as environment variables. Any key may be missing, and so
may the Secret. A step that is not listed gets none."""

SECRETS: Final = tuple(sorted({key for keys in STEP_SECRETS.values() for key in keys}))
"""Every key that at least one step gets."""

STEP_LABELS: Final = {
    "app.kubernetes.io/part-of": "steadytrain",
    "app.kubernetes.io/component": "step",
}
"""Labels of every step's pod. The network policies select by them."""

SUPERVISING: Final = ("train", "tune", "search", "train-winner", "cross-validate")
"""Steps that supervise training for as long as it takes."""

METRICS_LABEL: Final = ("steadytrain.io/step", "train")
"""Label and value of the pod that serves metrics. The PodMonitor selects by it."""

SCRAPE_ANNOTATIONS: Final = {
    "prometheus.io/scrape": "true",
    "prometheus.io/port": "9464",
    "prometheus.io/path": "/metrics",
}
"""Annotations of that pod, by which many installations of Prometheus find what to scrape."""

API_ACCESS: Final = ("access-ml-pipeline", "true")
"""Label and value that make full Kubeflow give a pod a token for KFP's API."""

"""What every pod of the product is given, by names that pipeline, launcher and manifests share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

MOUNT_PATH: Final = "/mnt/steadytrain"
"""Where every step finds the volume that all of them share; its default output folder."""

NAME: Final = "steadytrain"
"""Of the volume's claim, unless the run names another one, and of the Secret."""

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
# MLflow may keep its artifacts in S3 and leave it to its clients to write there.
_ARTIFACTS = (*TRACKING, *_S3)

STEP_SECRETS: Final[Mapping[str, tuple[str, ...]]] = {
    "look": (*_ARTIFACTS, *_HUB),
    # It stores the address of the pipeline's run with the MLflow run.
    "preprocess": (*_ARTIFACTS, *_HUB, "KF_PIPELINES_UI_ENDPOINT"),
    # The pods that train get what this one has.
    "train": (*_ARTIFACTS, *_HUB),
    "judge": _ARTIFACTS,
    "evaluate": _ARTIFACTS,
    "register": _ARTIFACTS,
    "promote": _ARTIFACTS,
    # It submits a run again that lost a step, and calls the webhook.
    "report": (
        *_ARTIFACTS,
        "KF_PIPELINES_ENDPOINT",
        "KF_PIPELINES_UI_ENDPOINT",
        "STEADYTRAIN_WEBHOOK_URL",
    ),
}
"""By step: the keys of the Secret that become its variables. Any key, and the Secret, may be
missing. A step that is not listed gets none."""

SECRETS: Final = tuple(sorted({key for keys in STEP_SECRETS.values() for key in keys}))
"""Every key that some step gets."""

STEP_LABELS: Final = {
    "app.kubernetes.io/part-of": "steadytrain",
    "app.kubernetes.io/component": "step",
}
"""Of every step's pod; the network policies go by them."""

API_ACCESS: Final = ("access-ml-pipeline", "true")
"""A label, and its value, by which full Kubeflow gives a pod a token for KFP's API."""

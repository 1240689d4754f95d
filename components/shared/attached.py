"""What every pod of the product is given, by names that pipeline, launcher and manifests share."""

from __future__ import annotations

from typing import Final

MOUNT_PATH: Final = "/mnt/steadytrain"
"""Where every step finds the volume that all of them share; its default output folder."""

NAME: Final = "steadytrain"
"""Of the volume's claim, unless the run names another one, and of the Secret."""

SECRETS: Final = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL",
    "HF_TOKEN",
    "KF_PIPELINES_ENDPOINT",
    "KF_PIPELINES_UI_ENDPOINT",
    "MLFLOW_TRACKING_URI",
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
    "STEADYTRAIN_WEBHOOK_URL",
)
"""Keys of the Secret, and the variables that they become. Any of them, and the Secret, may lack."""

STEP_LABELS: Final = {
    "app.kubernetes.io/part-of": "steadytrain",
    "app.kubernetes.io/component": "step",
}
"""Of every step's pod; the network policies go by them."""

API_ACCESS: Final = ("access-ml-pipeline", "true")
"""A label, and its value, by which full Kubeflow gives a pod a token for KFP's API."""

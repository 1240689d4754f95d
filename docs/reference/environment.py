"""Every environment variable that the code names, and which step of a cluster gets it."""

from __future__ import annotations

import ast
import re
from importlib import resources
from pathlib import Path
from typing import Final

from reference.markdown import code, table

from steadytrain.pipelines.pod_names import STEP_SECRETS

MEANINGS: Final = {
    "AWS_ACCESS_KEY_ID": "S3 credentials.",
    "AWS_SECRET_ACCESS_KEY": "S3 credentials.",
    "AWS_SESSION_TOKEN": "S3 credentials that expire.",
    "AWS_PROFILE": "A profile of the AWS configuration on this machine.",
    "AWS_DEFAULT_REGION": "Region of the bucket.",
    "AWS_ENDPOINT_URL": "Address of an S3 server of your own.",
    "HF_TOKEN": "Token for the Hugging Face hub.",
    "HF_HUB_OFFLINE": "1: nothing is fetched from the hub.",
    "HF_DATASETS_OFFLINE": "1: the `datasets` library fetches nothing.",
    "KFP_COOKIE": "Cookie of a login to multi-user Kubeflow.",
    "KFP_EXISTING_TOKEN": "Bearer token for the Kubeflow Pipelines API.",
    "KFP_NAMESPACE": "Namespace of your profile, where `--namespace` is not given.",
    "KFP_POD_NAME": "Set by Kubeflow Pipelines: the name of the step's own pod.",
    "KF_PIPELINES_ENDPOINT": "Address of the Kubeflow Pipelines API, where `--host` is not given.",
    "KF_PIPELINES_SA_TOKEN_PATH": "File with a service account token for the API.",
    "KF_PIPELINES_UI_ENDPOINT": "Address of the Kubeflow Pipelines UI, for links.",
    "KUBEFLOW_TRAINER_SERVER_URL": "Set by Kubeflow Trainer 2.2: where rank 0 posts its progress.",
    "KUBEFLOW_TRAINER_SERVER_CA_CERT": "Set by Kubeflow Trainer 2.2: the server's authority.",
    "KUBEFLOW_TRAINER_SERVER_TOKEN": "Set by Kubeflow Trainer 2.2: a file with the pod's token.",
    "MLFLOW_TRACKING_URI": "Address of the MLflow server, where `tracking.uri` is not set.",
    "MLFLOW_TRACKING_USERNAME": "Login for the MLflow server.",
    "MLFLOW_TRACKING_PASSWORD": "Login for the MLflow server.",
    "MLFLOW_TRACKING_TOKEN": "Token for the MLflow server.",
    "MLFLOW_REGISTRY_URI": "Address of the model registry, where it is not the tracking server.",
    "MLFLOW_EXPERIMENT_NAME": "The MLflow experiment, if the configuration names none.",
    "MLFLOW_EXPERIMENT_ID": "Does the same by its id; it must exist.",
    "MLFLOW_RUN_ID": "An MLflow run that this run reports into; it brings its own experiment.",
    "STEADYTRAIN_PUBLIC_VARIABLES": "Names of further variables, separated by commas, whose values "
    "may be shown. All values but those of harmless variables are redacted.",
    "STEADYTRAIN_WEBHOOK_URL": "Gets a JSON message when a run fails, a model becomes champion, or "
    "an alert fires or ends.",
    "STEADYTRAIN_REGISTRY": "Registry that compiled pipelines pull the images from, such as "
    "`registry.example.com/team`.",
    "STEADYTRAIN_UI_TOKEN": "Token that `steadytrain ui` asks for: at least 16 characters.",
    "STEADYTRAIN_SERVE_TOKEN": "Token that `steadytrain serve` asks for: at least 16 characters.",
    "STEADYTRAIN_IMAGE_DIGEST": "Digest of the container image, part of what makes code the same.",
}
"""What a user may set, and what each does."""

INTERNAL: Final = {
    "HF_HUB_DISABLE_PROGRESS_BARS",
    "MLFLOW_DISABLE_AGENT_HINT",
    "MLFLOW_DISABLE_TELEMETRY",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES",
    "MLFLOW_HTTP_REQUEST_TIMEOUT",
    "MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT",
    "STEADYTRAIN_ATTEMPT",
    "STEADYTRAIN_FEATURES",
    "STEADYTRAIN_LIFELINE",
}
"""What the product sets for its own processes."""

_NAME = re.compile(r"(?:AWS|HF|KF|KFP|KUBEFLOW|MLFLOW|STEADYTRAIN)_[A-Z][A-Z_]*[A-Z]")


def page() -> str:
    """One table."""
    intro = (
        "# Environment variables\n\n"
        "Secrets come from the environment, never from a configuration. On a cluster they are "
        "keys of the Secret `steadytrain`, and each step gets only the keys it uses. "
        "`steadytrain doctor` shows which of them this machine has, without their values.\n"
    )
    rows = [(code(name), meaning, _steps(name)) for name, meaning in sorted(MEANINGS.items())]
    return "\n".join([intro, table(("Variable", "Meaning", "From the Secret, for"), rows)])


def named() -> set[str]:
    """Every name of these families that stands as a text of its own in the code."""
    found = set()
    for package in ("steadytrain.components", "steadytrain.pipelines"):
        for file in Path(str(resources.files(package))).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                text = node.value if isinstance(node, ast.Constant) else None
                if isinstance(text, str) and _NAME.fullmatch(text):
                    found.add(text)
    return found


def _steps(name: str) -> str:
    return ", ".join(step for step, keys in STEP_SECRETS.items() if name in keys)

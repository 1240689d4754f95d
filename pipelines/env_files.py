"""`.env.example` and `.gitignore` beside a new configuration: which keys, where to get each."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from steadytrain.components.shared.errors import BadInput

EXAMPLE: Final = ".env.example"
_IGNORED: Final = (".env*", f"!{EXAMPLE}")
_KEYS: Final = (
    (
        "Hugging Face hub: private data and models (hub:). "
        "Get it at https://huggingface.co/settings/tokens, with the right to read.",
        {"HF_TOKEN": "your_huggingface_token_here"},
    ),
    (
        "S3: data, models and checkpoints (s3://). Get them in the AWS console under IAM, Users, "
        "Security credentials; AWS_ENDPOINT_URL is for other providers, such as MinIO.",
        {
            "AWS_ACCESS_KEY_ID": "your_aws_access_key_id_here",
            "AWS_SECRET_ACCESS_KEY": "your_aws_secret_access_key_here",
            "AWS_ENDPOINT_URL": "your_s3_endpoint_here",
        },
    ),
    (
        "MLflow server; without it, runs are recorded in the output folder. Ask whoever runs the "
        "server for a token, or for a user and a password.",
        {
            "MLFLOW_TRACKING_URI": "your_mlflow_address_here",
            "MLFLOW_TRACKING_TOKEN": "your_mlflow_token_here",
        },
    ),
    (
        "Weights & Biases, for tracking.sinks with wandb. Get it at https://wandb.ai/authorize.",
        {"WANDB_API_KEY": "your_wandb_api_key_here"},
    ),
    (
        "Messages about failed runs and new champions. Get the address from your chat's page for "
        "incoming webhooks.",
        {"STEADYTRAIN_WEBHOOK_URL": "your_webhook_url_here"},
    ),
)


def example() -> str:
    """Return the content of `.env.example`."""
    lines = [
        "# Copy this file to .env, fill in what you use, and remove the rest.",
        "# Load it before steadytrain, which reads the environment and no file:",
        "#   set -a; . ./.env; set +a",
        "# git ignores .env. On a cluster, put these keys into a Kubernetes Secret.",
    ]
    for text, keys in _KEYS:
        lines += ["", f"# {text}", *(f"{name}={value}" for name, value in keys.items())]
    return "\n".join(lines) + "\n"


def write_env_files(folder: Path) -> list[str]:
    """Write both files, and return what was done.

    An `.env.example` that exists stays as it is. `.gitignore` gets only the lines that it lacks.

    Raises:
        BadInput: a file cannot be read or written.
    """
    done = []
    keys, ignored = folder / EXAMPLE, folder / ".gitignore"
    try:
        if keys.exists():
            done.append(f"left {keys} as it is")
        else:
            keys.write_text(example(), encoding="utf-8")
            done.append(f"wrote {keys}")
        text = ignored.read_text(encoding="utf-8") if ignored.exists() else ""
        # The last rule that matches counts, so the exception must follow.
        rules_there = [line.strip() for line in text.splitlines() if line.strip() in _IGNORED]
        if rules_there[-2:] != [*_IGNORED]:
            gap = "" if not text or text.endswith("\n") else "\n"
            rules = "\n".join(_IGNORED)
            ignored.write_text(f"{text}{gap}{rules}\n", encoding="utf-8")
            done.append(f"{'added .env* to' if text else 'wrote'} {ignored}")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(
            f"{error}", remedy="run init in a folder that you may write, or with --no-env"
        ) from error
    return done

"""A user-defined task that leaks everything it knows when it fails."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.evaluating import SHAPES, Shapes

CANARY = "c4n4ryV4lue"
ENVIRONMENT = {
    name: f"{CANARY}-{index}/x+y="
    for index, name in enumerate(
        (
            "HF_TOKEN",
            "AWS_SECRET_ACCESS_KEY",
            "AWS_SESSION_TOKEN",
            "MLFLOW_TRACKING_PASSWORD",
            "KFP_EXISTING_TOKEN",
            "KFP_COOKIE",
            "GITHUB_TOKEN",
            "WANDB_API_KEY",
            "DATABASE_PASSWORD",
        )
    )
} | {"STEADYTRAIN_WEBHOOK_URL": f"http://127.0.0.1:9/hooks/{CANARY}"}
TEXT = "\n".join(
    (
        f"glpat-{CANARY * 2} github_pat_{CANARY * 5} AIza{CANARY * 3}xx hf_{CANARY * 3}",
        f"https://{CANARY}@host/x https://host/x?a=1&X-Amz-Signature={CANARY}",
        f"https://host?token={CANARY} postgresql://user:{CANARY}/x@host/db",
        f"{{'password': '{CANARY}'}} Authorization: Bearer {CANARY}",
        f"-----BEGIN PRIVATE KEY-----\n{CANARY}\n-----END PRIVATE KEY-----",
    )
)


class Leaking(Shapes):
    """Fails with the environment and every kind of secret in its message, twice."""

    def load_exported(self, folder: Path) -> dict[str, Any]:
        try:
            raise KeyError(repr(dict(os.environ)))
        except KeyError as error:
            values = " ".join(ENVIRONMENT.values())
            raise RuntimeError(f"{TEXT}\n{values}\n{dict(os.environ)}") from error


LEAKING = replace(SHAPES, packager=Leaking)

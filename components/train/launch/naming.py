"""Names and labels of what a run has on a cluster."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Final

from steadytrain.components.train.attempt import AttemptSpec

RUN: Final = "steadytrain.io/run"
ATTEMPT: Final = "steadytrain.io/attempt"
GENERATION: Final = "steadytrain.io/generation"
PIPELINE_RUN: Final = "pipeline/runid"
"""KFP's label for the id of its run; its pods bear it, and what they start."""
FOLDER: Final = "steadytrain.io/folder"
"""Annotation: the attempt's folder, which tells apart two runs of one name."""

_LONGEST: Final = 63 - len("-worker-0-9999-abcde")
"""Of a job's name, so that those of its pods, which carry more (Trainer's "-node-0-<n>-<random>",
the training operator's "-worker-<n>"), remain names of hosts."""
_ATTEMPT_DIGITS: Final = 6
_DIGEST: Final = 8


def job_name(run_id: str, attempt: int) -> str:
    """`<run>-a<N>`, an RFC 1035 label.

    A run whose name is too long for that, or begins with a digit, has a digest in it.
    """
    room, run = _LONGEST - len("-a") - _ATTEMPT_DIGITS, run_id
    if len(run) > room or not run[0].isalpha():
        digest = hashlib.sha256(run_id.encode()).hexdigest()[:_DIGEST]
        run = run if run[0].isalpha() else f"run-{run}"
        run = f"{run[: room - _DIGEST - 1].rstrip('-')}-{digest}"
    return f"{run}-a{attempt}"


def run_labels(run_id: str) -> dict[str, str]:
    """That all of a run's objects bear."""
    return {"app.kubernetes.io/managed-by": "steadytrain", RUN: run_id}


def attempt_labels(spec: AttemptSpec) -> dict[str, str]:
    """Which lead from a pod to its run, its attempt and its supervisor."""
    told = {ATTEMPT: str(spec.attempt), GENERATION: str(spec.generation)}
    return run_labels(spec.run_id) | told


def is_of(manifest: dict[str, Any], attempts: Path) -> bool:
    """Whether a job belongs to the run whose attempts lie in a folder."""
    folder = manifest["metadata"].get("annotations", {}).get(FOLDER, "")
    return Path(folder).parent == attempts

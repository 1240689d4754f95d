"""Names and labels of a run's objects on a cluster."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Final

from steadytrain.components.train.attempt import AttemptSpec

MANAGED: Final = {"app.kubernetes.io/managed-by": "steadytrain"}
"""Labels of every object that steadytrain creates."""
RUN: Final = "steadytrain.io/run"
ATTEMPT: Final = "steadytrain.io/attempt"
GENERATION: Final = "steadytrain.io/generation"
PIPELINE_RUN: Final = "pipeline/runid"
"""KFP's label for its run id; its pods have it, and so does everything that they start."""
FOLDER: Final = "steadytrain.io/folder"
"""Annotation with the attempt's folder, which tells apart two runs of the same name."""

_LONGEST: Final = 63 - len("-worker-0-9999-abcde")
"""Longest job name. Pod names append to it (Trainer's "-node-0-<n>-<random>", the training
operator's "-worker-<n>") and must remain valid host names."""
_ATTEMPT_DIGITS: Final = 6
_DIGEST: Final = 8


def job_name(run_id: str, attempt: int) -> str:
    """Return `<run>-a<N>`, an RFC 1035 label.

    If the run's name is too long or doesn't start with a letter, the label includes a digest.
    """
    room, run = _LONGEST - len("-a") - _ATTEMPT_DIGITS, run_id
    if len(run) > room or not run[0].isalpha():
        digest = hashlib.sha256(run_id.encode()).hexdigest()[:_DIGEST]
        run = run if run[0].isalpha() else f"run-{run}"
        run = f"{run[: room - _DIGEST - 1].rstrip('-')}-{digest}"
    return f"{run}-a{attempt}"


def run_labels(run_id: str) -> dict[str, str]:
    """Return the labels of all of a run's objects."""
    return MANAGED | {RUN: run_id}


def attempt_labels(spec: AttemptSpec) -> dict[str, str]:
    """Return the labels that lead from a pod to its run, its attempt and its supervisor."""
    labels = {ATTEMPT: str(spec.attempt), GENERATION: str(spec.generation)}
    return run_labels(spec.run_id) | labels


def is_of(manifest: dict[str, Any], attempts: Path) -> bool:
    """Return whether a job belongs to the run whose attempts are in a folder."""
    return _attempt(manifest).parent == attempts


def is_below(manifest: dict[str, Any], folder: Path) -> bool:
    """Return whether a job belongs to a run in a folder, at any depth."""
    return _attempt(manifest).is_relative_to(folder)


def _attempt(manifest: dict[str, Any]) -> Path:
    """Return the folder of an object's attempt."""
    return Path(manifest["metadata"].get("annotations", {}).get(FOLDER, ""))

"""One line of the doctor's report on a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

APPLY: Final = "kubectl apply -k manifests/overlays/standalone (in a profile: kubeflow-profile)"
"""The fix for everything that the manifests provide."""

State = Literal["pass", "fail", "not asked"]


@dataclass(frozen=True)
class Line:
    """The result of one check, or why it was skipped.

    remedy: how to fix it, unless it passed.
    """

    topic: str
    state: State
    text: str
    remedy: str = ""


def passed(topic: str, text: str) -> Line:
    """Return a line for a check that passed."""
    return Line(topic, "pass", text)


def failed(topic: str, text: str, remedy: str) -> Line:
    """Return a line for a problem that would prevent a run."""
    return Line(topic, "fail", text, remedy)


def unasked(topic: str, text: str, remedy: str) -> Line:
    """Return a line for a check that was not requested, or could not be done."""
    return Line(topic, "not asked", text, remedy)

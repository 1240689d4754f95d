"""One line of the doctor's report on a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

APPLY: Final = "kubectl apply -k manifests/overlays/standalone (in a profile: kubeflow-profile)"
"""The remedy for whatever the manifests bring."""

State = Literal["pass", "fail", "not asked"]


@dataclass(frozen=True)
class Line:
    """One thing that was looked at, or why it was not.

    remedy: what helps, where it did not pass.
    """

    topic: str
    state: State
    text: str
    remedy: str = ""


def passed(topic: str, text: str) -> Line:
    """All is well with it."""
    return Line(topic, "pass", text)


def failed(topic: str, text: str, remedy: str) -> Line:
    """It stands in a run's way."""
    return Line(topic, "fail", text, remedy)


def unasked(topic: str, text: str, remedy: str) -> Line:
    """Nobody knows: it was not asked for, or could not be asked."""
    return Line(topic, "not asked", text, remedy)

"""A run's story as a line of a log, for readers that cannot see the run's folder.

The exit handler of a pipeline prints it. `submit --wait` finds it in the log of that step's pod.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any, Final, get_args

from steadytrain.components.report.story import RunState, RunSummary
from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.events.types import StepFailed

_MARK: Final = "steadytrain story: "
_FAILURE: Final = ("stage", "error", "message", "remedy")


def as_line(standing: RunSummary) -> str:
    """Return a story as one line."""
    content = asdict(standing)
    if standing.failure:
        failure = standing.failure
        content["failure"] = {name: redact(getattr(failure, name)) for name in _FAILURE}
    return f"{_MARK}{json.dumps(content)}"


def from_log(log: str) -> RunSummary | None:
    """Return the last story in a log; None if there is none."""
    lines = [line.partition(_MARK)[2] for line in log.splitlines() if _MARK in line]
    return _parsed(lines[-1]) if lines else None


def _parsed(line: str) -> RunSummary | None:
    """Return the story in a line; None if the line is damaged."""
    try:
        content: Any = json.loads(line)
        failure = None
        if content["failure"]:
            stage, error, message, remedy = (str(content["failure"][name]) for name in _FAILURE)
            failure = StepFailed(stage=stage, error=error, message=message, remedy=remedy)
        state, sentence, again = (content[key] for key in ("state", "sentence", "resubmitted_as"))
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if state not in get_args(RunState):
        return None
    return RunSummary(state, str(sentence), failure, str(again))

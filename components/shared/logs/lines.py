"""Log lines: one JSON object, or one line of text, for each event."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any, Final

from steadytrain.components.shared.config.observability import LogFormat
from steadytrain.components.shared.events import Event
from steadytrain.components.shared.events.types import (
    AttemptStarted,
    CheckpointSaved,
    GradientOverflow,
    StepStarted,
    TrainingDiverged,
    TrainingFinished,
    TrainingStarted,
    TrainingStep,
    Validated,
)
from steadytrain.components.shared.logs.conclusions import Observer
from steadytrain.components.shared.redaction import redact

STANDARD: Final = (
    "time",
    "level",
    "event",
    "job_id",
    "run",
    "attempt",
    "rank",
    "epoch",
    "step",
    "loss",
    "gpu_memory_used",
)
"""Fields of every line, null if unknown. The fields of the event itself follow."""
_LEVELS: Final = {"warn": "warning"}
_OF_RANK_0: Final = (
    TrainingStarted,
    TrainingStep,
    Validated,
    CheckpointSaved,
    TrainingDiverged,
    GradientOverflow,
    TrainingFinished,
)
_LASTING: Final = ("attempt", "epoch", "step", "loss", "gpu_memory_used")


def _print(line: str) -> None:
    sys.stdout.write(line)
    sys.stdout.flush()


class Log:
    """A sink that writes a line for each event, and one for each conclusion from it.

    Args:
        job_id: the run's name.
        write: receives each line, with its newline.
    """

    def __init__(
        self, job_id: str, form: LogFormat, write: Callable[[str], object] = _print
    ) -> None:
        self.job_id, self.write = job_id, write
        self._text = as_json if form == "json" else as_text
        self._observer = Observer()
        self._known: dict[str, Any] = dict.fromkeys(_LASTING)

    def emit(self, event: Event) -> None:
        for line in self._lines(event):
            self.write(f"{self._text(line)}\n")

    def close(self) -> None:
        """Do nothing: every line is written at once."""

    def _lines(self, event: Event) -> Iterator[dict[str, Any]]:
        own = {item.name: getattr(event, item.name) for item in fields(event)}
        if own.get("batch") is not None:
            own |= vars(own.pop("batch"))
        own = {name: _plain(value) for name, value in own.items() if name != "time"}
        if isinstance(event, AttemptStarted | StepStarted):
            self._known = dict.fromkeys(_LASTING)
        self._known |= {name: own[name] for name in _LASTING if name in own}
        rank = 0 if isinstance(event, _OF_RANK_0) else None
        yield self._line(event, event.name, event.severity, rank) | own
        for conclusion, about in self._observer.conclude(event):
            told = {name: _plain(value) for name, value in about.items()}
            yield self._line(event, conclusion.name, conclusion.level, rank) | told

    def _line(self, event: Event, name: str, level: str, rank: int | None) -> dict[str, Any]:
        """Return the fields that every line has."""
        time = datetime.fromtimestamp(event.time, UTC).isoformat(timespec="milliseconds")
        line = dict.fromkeys(STANDARD) | self._known
        line |= {"time": time, "level": _LEVELS.get(level, level), "event": name, "rank": rank}
        return line | {"job_id": self.job_id, "run": self.job_id}


def as_json(line: Mapping[str, Any]) -> str:
    """Return a line as one JSON object."""
    return json.dumps(line, ensure_ascii=False, allow_nan=False)


def as_text(line: Mapping[str, Any]) -> str:
    """Return a line as text: time, level and event, and each known field as name=value."""
    rest = (
        f"{name}={_quoted(value)}"
        for name, value in line.items()
        if name not in ("time", "level", "event", "job_id") and value not in (None, "", [], {})
    )
    return " ".join([line["time"], f"{line['level']:7}", line["event"], *rest])


def _quoted(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    plain = isinstance(value, str) and not any(char.isspace() or char in '"=' for char in value)
    return text if plain or not isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """Return a value that any reader of JSON accepts, without secrets."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {redact(str(name)): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value

"""A run's events as log lines for people and for log collectors."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from steadytrain.components.shared.cluster import this_pod_name
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.operations import LogFormat
from steadytrain.components.shared.events import Cursor, Event
from steadytrain.components.shared.events.types import (
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    DecisionMade,
    GradientOverflow,
    Level,
    StepStarted,
    TrainingDiverged,
    TrainingFinished,
    TrainingStarted,
    TrainingStep,
    Validated,
)
from steadytrain.components.shared.periodic import Periodic
from steadytrain.components.shared.redaction import redact
from steadytrain.components.shared.workspace import Workspace

LOW_UTILIZATION: Final = 0.5
LOW_UTILIZATION_SECONDS: Final = 600.0
"""A GPU is little used if its mean utilization is below the share for this long."""


@dataclass(frozen=True)
class Conclusion:
    """A problem that the log names."""

    name: str
    level: Level
    meaning: str
    remedy: str


CUDA_OOM: Final = Conclusion(
    "cuda_oom",
    "error",
    "An attempt, or one of its steps, ran out of device memory (failure class gpu_oom).",
    "None needed: the run continues with less memory. If it stops, use a smaller "
    "training.micro_batch_size or sequence length.",
)
NCCL_TIMEOUT: Final = Conclusion(
    "nccl_timeout",
    "error",
    "Ranks waited too long for each other (failure class collective_timeout).",
    "None needed: the run starts again. If it repeats, look at the slowest rank's log and at the "
    "network between the nodes.",
)
GPU_UTIL_LOW: Final = Conclusion(
    "gpu_util_low",
    "warn",
    f"Rank 0's GPU was busy for less than {LOW_UTILIZATION:.0%} of the last "
    f"{LOW_UTILIZATION_SECONDS / 60:g} minutes.",
    "Look at step_seconds: if data dominates, the input is too slow; if communication does, use "
    "fewer nodes or a faster network; otherwise use a larger training.micro_batch_size.",
)
CONCLUSIONS: Final = (GPU_UTIL_LOW, CUDA_OOM, NCCL_TIMEOUT)
_OF_FAILURES: Final = {"gpu_oom": CUDA_OOM, "collective_timeout": NCCL_TIMEOUT}


class Observer:
    """Draws conclusions from events in their order."""

    def __init__(self) -> None:
        self._attempt = 0
        self._shares: deque[tuple[float, float]] = deque()
        self._low = False

    def conclude(self, event: Event) -> Iterator[tuple[Conclusion, dict[str, Any]]]:
        """Yield each conclusion with the fields of its line."""
        if isinstance(event, AttemptEnded) and event.failure_class in _OF_FAILURES:
            about = {"attempt": event.attempt, "message": event.message, "remedy": event.remedy}
            yield _OF_FAILURES[event.failure_class], about
        elif isinstance(event, DecisionMade) and event.in_place:
            about = {"attempt": event.attempt, "message": event.reason, "remedy": CUDA_OOM.remedy}
            yield CUDA_OOM, about
        elif isinstance(event, TrainingStep) and event.gpu_utilization is not None:
            mean = self._mean(event, event.gpu_utilization)
            low = mean is not None and mean < LOW_UTILIZATION
            if low and not self._low:
                yield GPU_UTIL_LOW, {"gpu_utilization": mean, "remedy": GPU_UTIL_LOW.remedy}
            # One line until the GPU is busy again.
            self._low = low or (self._low and mean is None)

    def _mean(self, event: TrainingStep, share: float) -> float | None:
        """Return the mean over the last minutes; None before an attempt has trained for so long."""
        if event.attempt != self._attempt:
            self._attempt, self._low = event.attempt, False
            self._shares.clear()
        self._shares.append((event.time, share))
        began = event.time - LOW_UTILIZATION_SECONDS
        if self._shares[0][0] > began:
            return None
        while len(self._shares) > 1 and self._shares[1][0] <= began:
            self._shares.popleft()
        return sum(value for _, value in self._shares) / len(self._shares)


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
            values = {name: _plain(value) for name, value in about.items()}
            yield self._line(event, conclusion.name, conclusion.level, rank) | values

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


POLL_SECONDS = 0.5
CLOSE_SECONDS = 5.0
"""How long the end of a step waits for a reader of its output that hangs."""


@contextlib.contextmanager
def following(config: RunConfig, workspace: Workspace) -> Iterator[None]:
    """Write the events of the run that come while the block runs, if the step writes a log."""
    form = step_format(config)
    if form is None:
        yield
        return
    cursor, log = Cursor(workspace.events), Log(workspace.run_id, form)
    cursor.skip_to_end()

    def relay() -> None:
        for event in cursor.new():
            log.emit(event)

    # If nobody reads the output any more, the step continues without a log.
    unread = partial(contextlib.suppress, OSError, ValueError)
    thread = Periodic("log", relay, every=POLL_SECONDS, finish=relay, around=unread)
    try:
        yield
    finally:
        thread.end(CLOSE_SECONDS)


def step_format(config: RunConfig) -> LogFormat | None:
    """Return the format of a step's log.

    None on a machine of your own, where the command that started the run shows it.
    """
    chosen = config.observability.logs
    if chosen == "auto":
        return "json" if this_pod_name() else None
    return chosen

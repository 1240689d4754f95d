"""One run as far as it has been read, and what follows from it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial
from typing import Final, TypeVar

from steadytrain.components.observe.run_metrics import RunMetrics
from steadytrain.components.report.facts import Facts
from steadytrain.components.shared.config.document import parse
from steadytrain.components.shared.config.saved import damage
from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.events import Event
from steadytrain.components.shared.quantities import size
from steadytrain.components.shared.records import (
    EvaluationRecord,
    GateRecord,
    Record,
    RegistrationRecord,
    TrainRecord,
)
from steadytrain.pipelines.view.event_log import Detail, EventLog, merged
from steadytrain.pipelines.view.source import Source, Stamp

R = TypeVar("R", bound=Record)
LARGEST_CONFIG: Final = 256 << 10
"""Bytes of a configuration that a page shows."""
FILL_BYTES: Final = 64 << 20
"""How much of a long file `fill` reads at a time."""


class RunReader:
    """Follows the events of a run."""

    def __init__(self, source: Source, run: str, detail: Detail) -> None:
        self.source, self.run, self.detail = source, run, detail
        self._logs: dict[str, EventLog] = {}
        self._lock = threading.Lock()

    @property
    def is_sample(self) -> bool:
        """Whether events are missing, such as training steps."""
        return any(log.is_sample for log in self._logs.values())

    @property
    def unread(self) -> int:
        """The bytes that `fill` has still to read."""
        return sum(log.unread for log in self._logs.values())

    def events(self, files: Mapping[str, Stamp]) -> list[Event]:
        """Return the events of the run's files, as far as they are read, ordered by time."""
        with self._lock:
            for name in self._logs.keys() - files.keys():
                del self._logs[name]
            for name, stamp in files.items():
                if name not in self._logs:
                    read = partial(self.source.read, self.run, name)
                    self._logs[name] = EventLog(read, self.detail)
                self._logs[name].follow(stamp.size)
            return merged(list(self._logs.values()))

    def fill(self) -> None:
        """Read a further part of the longest file, if that costs neither money nor a network."""
        if not self.source.is_local:
            return
        with self._lock:
            waiting = [log for log in self._logs.values() if log.unread]
            if waiting:
                max(waiting, key=lambda log: log.unread).fill(FILL_BYTES)


def brief(source: Source, run: str, events: list[Event]) -> Facts:
    """Return what a row of a list needs. Whether the gate promoted decides what is finished."""
    gate = _record(source, run, "gate", GateRecord)
    return Facts(source.workspace(run), events=events, gate=gate)


def full(source: Source, run: str, events: list[Event]) -> Facts:
    """Return what a page needs. The data card is left to the report."""
    facts = brief(source, run, events)
    facts.history = RunMetrics.of(events).history
    body = source.read(run, "config.yaml", 0, LARGEST_CONFIG + 1)
    text = body[:LARGEST_CONFIG].decode("utf-8", "replace")
    facts.config_text = redact(text)
    is_cut = len(body) > LARGEST_CONFIG
    if is_cut:
        facts.unreadable.append(
            f"config.yaml is larger than {size(LARGEST_CONFIG)}; its beginning is shown"
        )
    try:
        content = parse(facts.config_text, "config.yaml") if body and not is_cut else {}
        facts.config = content if isinstance(content, dict) else {}
        # Redacting changes values, so the digests are those of the text before.
        if facts.config and (harm := damage(text, parse(text, "config.yaml"))):
            facts.unreadable.append(f"config.yaml {harm}")
    except BadInput as error:
        facts.unreadable.append(error.message)
    facts.training = _record(source, run, "train", TrainRecord)
    facts.evaluation = _record(source, run, "evaluate", EvaluationRecord)
    facts.registration = _record(source, run, "register", RegistrationRecord)
    facts.promotion = _record(source, run, "promote", RegistrationRecord)
    return facts


def _record(source: Source, run: str, step: str, kind: type[R]) -> R | None:
    """Return a step's record; None if it is missing or damaged."""
    body = source.read(run, f"records/{step}.json")
    try:
        return kind.model_validate_json(body) if body else None
    except ValueError:
        return None

"""Everything that the report shows, read from the run's folder. Missing records are None."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from steadytrain.components.shared.config.document import damage, parse
from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.errors import BadInput, StorageError
from steadytrain.components.shared.events import Event, problems, read_events
from steadytrain.components.shared.nccl import NcclSummary, summary_of_logs
from steadytrain.components.shared.quantities import duration, is_number, percent
from steadytrain.components.shared.records import (
    DataRecord,
    EvaluationRecord,
    GateRecord,
    Record,
    RegistrationRecord,
    TrainRecord,
)
from steadytrain.components.shared.storage.local import open_regular
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.attempt import LOGS
from steadytrain.components.train.recovery.history import History
from steadytrain.components.train.recovery.ledger import Ledger
from steadytrain.components.train.recovery.times import (
    Span,
    Times,
    last_sign_of_life,
    pods_waited,
    spans,
)

R = TypeVar("R", bound=Record)
E = TypeVar("E", bound=Event)


@dataclass
class Facts:
    """What a run has written to its folder.

    config: the configuration as plain data.
    config_text: the configuration as YAML.
    card: the data card as plain data.
    history: training's ledger.
    unreadable: files and entries that are damaged or cannot be read, with the reason.
    left_out: damaged lines of the event log, which cost no more than what they said.
    running: whether a process works on the run, as its lease or its lock shows.
    """

    workspace: Workspace
    events: list[Event] = field(default_factory=list)
    history: History = field(default_factory=History)
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    data: DataRecord | None = None
    card: dict[str, Any] | None = None
    training: TrainRecord | None = None
    evaluation: EvaluationRecord | None = None
    gate: GateRecord | None = None
    registration: RegistrationRecord | None = None
    promotion: RegistrationRecord | None = None
    unreadable: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    running: bool = False

    @property
    def spans(self) -> list[Span]:
        """How training's time was spent."""
        running = [attempt for attempt in self.history.attempts if attempt.ended is None]
        until = last_sign_of_life(running[-1], self.events)[0] if running else 0.0
        for attempt in running:
            attempt.waited = pods_waited(attempt.started, self.events, until)
        return spans(self.history, until=until)

    @property
    def nccl(self) -> NcclSummary | None:
        """What NCCL says in the logs of the newest attempt's ranks; None if it says nothing."""
        if not self.history.attempts:
            return None
        number = self.history.attempts[-1].started.attempt
        return summary_of_logs(sorted((self.workspace.attempts / f"{number:04d}").glob(LOGS)))

    def of(self, kind: type[E]) -> list[E]:
        """Return the events of one type, in time order."""
        return [event for event in self.events if isinstance(event, kind)]

    def setting(self, dotted: str) -> Any:
        """Return a field of the configuration, such as "data.task", or None if it is not set."""
        value: Any = self.config
        for name in dotted.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value


def gather(workspace: Workspace, *, running: bool = False) -> Facts:
    """Read the run's folder. Missing or damaged content never raises an error.

    Args:
        running: as in `Facts`. Whoever reads the run knows it, not the folder.
    """
    skipped = Counter[str]()
    facts = Facts(workspace, events=read_events(workspace.events, skipped), running=running)
    facts.left_out = [
        f"{workspace.events / name}: left out because they are not events: {count} lines"
        for name, count in skipped.items()
    ]
    facts.unreadable += problems(workspace.events)
    facts.history = _history(facts)
    text = _text(facts, workspace.config)
    facts.config_text = redact(text)
    facts.config = _mapping(facts, workspace.config, facts.config_text)
    # Redacting changes values, so the digests are those of the text before.
    if facts.config and (harm := damage(text, _mapping(facts, workspace.config, text))):
        facts.unreadable.append(f"{workspace.config} {harm}")
    facts.data = _record(facts, "preprocess", DataRecord)
    facts.training = _record(facts, "train", TrainRecord)
    facts.evaluation = _record(facts, "evaluate", EvaluationRecord)
    facts.gate = _record(facts, "gate", GateRecord)
    facts.registration = _record(facts, "register", RegistrationRecord)
    facts.promotion = _promotion(facts)
    if facts.data is not None:
        path = facts.data.path("card.json")
        facts.card = _mapping(facts, path, _text(facts, path)) or None
    return facts


def _history(facts: Facts) -> History:
    try:
        history, lost = Ledger(facts.workspace).readable()
    except (BadInput, StorageError) as error:
        facts.unreadable.append(error.message)
        return History()
    facts.unreadable += lost
    return history


def _promotion(facts: Facts) -> RegistrationRecord | None:
    """Return the promotion of the registered version, if the gate's decision led to it.

    That of an earlier model or decision stays in the folder until the run promotes again.
    """
    promotion, registration = _record(facts, "promote", RegistrationRecord), facts.registration
    if promotion is None or registration is None or facts.gate is None:
        return promotion
    ours = promotion.same_version(registration) and promotion.champion == facts.gate.promoted
    return promotion if ours else None


def _record(facts: Facts, step: str, kind: type[R]) -> R | None:
    path = facts.workspace.record(step)
    try:
        return kind.load(path) if os.path.lexists(path) else None
    except (BadInput, StorageError) as error:
        facts.unreadable.append(_first_line(error.message))
        return None


def _text(facts: Facts, path: Path) -> str:
    if not os.path.lexists(path):
        return ""
    try:
        with open_regular(path) as handle:
            return handle.read().decode("utf-8", "replace")
    except OSError as error:
        facts.unreadable.append(f"{path}: {error.strerror}")
        return ""


def _mapping(facts: Facts, path: Path, text: str) -> dict[str, Any]:
    try:
        content = json.loads(text) if path.suffix == ".json" and text else parse(text, "it")
    except (ValueError, RecursionError, BadInput) as error:
        reason = error.message if isinstance(error, BadInput) else str(error)
        facts.unreadable.append(f"{path}: {_first_line(reason)}")
        return {}
    if isinstance(content, dict):
        return content
    if os.path.lexists(path):
        facts.unreadable.append(f"{path}: holds no settings")
    return {}


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


MEANINGS: Final = {
    "useful": "produced the current result",
    "lost": "work that was repeated or discarded, including the time to notice and end the failure",
    "restarting": "from the start of the ranks to their first step, including the first start",
    "checkpointing": "training paused for a checkpoint",
    "waiting": "no ranks: between attempts, and between supervisors",
}
"""The kinds of time, in display order."""


@dataclass(frozen=True)
class Spending:
    """The time that training needed, and the price of it.

    price_per_hour: in USD; None if it is not configured.
    """

    times: Times
    price_per_hour: float | None

    @classmethod
    def of(cls, facts: Facts) -> Spending:
        price = facts.setting("compute.price_per_hour")
        return cls(Times.of(facts.spans), float(price) if is_number(price) else None)

    @property
    def rows(self) -> list[tuple[str, list[str], float]]:
        """Rows of kind; time, share of the wall clock and meaning; and seconds."""
        return [
            (kind, [duration(took), percent(took / (self.times.wall or 1.0)), MEANINGS[kind]], took)
            for kind, took in asdict(self.times).items()
        ]

    @property
    def cost(self) -> str:
        """The cost in one sentence, or how to configure it."""
        if self.price_per_hour is None:
            return "not known: set compute.price_per_hour (USD, for all nodes together)"
        times, price = self.times, self.price_per_hour
        wasted = times.cost(price) - price * times.useful / 3600
        return (
            f"{times.cost(price):,.2f} USD at {price:,.2f} USD per hour, without waits; "
            f"{wasted:,.2f} USD of that was not useful"
        )

    def lines(self) -> list[str]:
        """Return lines for a terminal, empty before the first attempt."""
        if not self.times.wall:
            return []
        shares = ", ".join(f"{kind} {share}" for kind, (_, share, _), _ in self.rows)
        return [
            f"training: {duration(self.times.wall)}: {shares}",
            f"goodput: {percent(self.times.goodput)}",
            f"cost: {self.cost}",
        ]

    def metrics(self) -> Mapping[str, float]:
        """Return metrics for MLflow by name, empty before the first attempt."""
        if not self.times.wall:
            return {}
        result = {f"time_{kind}_seconds": seconds for kind, seconds in asdict(self.times).items()}
        result |= {"training_duration_seconds": self.times.wall, "goodput": self.times.goodput}
        if self.price_per_hour is not None:
            result["cost_usd"] = self.times.cost(self.price_per_hour)
        return result

"""Everything that the report tells, read from the run's folder. What is missing is None."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.events import Event, read_events
from steadytrain.components.shared.records import (
    DataRecord,
    EvaluationRecord,
    GateRecord,
    Record,
    RegistrationRecord,
    TrainRecord,
)
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.recovery.ledger import History, Ledger
from steadytrain.components.train.recovery.times import Span, last_sign_of_life, spans

R = TypeVar("R", bound=Record)
E = TypeVar("E", bound=Event)


@dataclass
class Facts:
    """What a run left behind.

    config: the configuration as plain data; config_text: as YAML.
    card: the data card as plain data.
    history: training's ledger.
    unreadable: files that are there and cannot be read, with the reason.
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

    @property
    def spans(self) -> list[Span]:
        """Where training's time went."""
        running = [attempt for attempt in self.history.attempts if attempt.ended is None]
        until = last_sign_of_life(running[-1], self.events)[0] if running else 0.0
        return spans(self.history, until=until)

    def of(self, kind: type[E]) -> list[E]:
        """The events of one type, in the order of their times."""
        return [event for event in self.events if isinstance(event, kind)]

    def setting(self, dotted: str) -> Any:
        """A field of the configuration, such as "data.task"; None where there is none."""
        place: Any = self.config
        for name in dotted.split("."):
            place = place.get(name) if isinstance(place, dict) else None
        return place


def gather(workspace: Workspace) -> Facts:
    """Reads the run's folder; never raises for what is in it, or is not."""
    facts = Facts(workspace, events=read_events(workspace.events))
    facts.history = _history(facts)
    facts.config_text = redact(_text(facts, workspace.config))
    facts.config = _mapping(facts, workspace.config, facts.config_text)
    facts.data = _record(facts, "preprocess", DataRecord)
    facts.training = _record(facts, "train", TrainRecord)
    facts.evaluation = _record(facts, "evaluate", EvaluationRecord)
    facts.gate = _record(facts, "gate", GateRecord)
    facts.registration = _record(facts, "register", RegistrationRecord)
    facts.promotion = _record(facts, "promote", RegistrationRecord)
    if facts.data is not None:
        path = facts.data.path("card.json")
        facts.card = _mapping(facts, path, _text(facts, path)) or None
    return facts


def _history(facts: Facts) -> History:
    ledger = Ledger(LocalStorage(facts.workspace.ledger), run_id=facts.workspace.run_id)
    try:
        return ledger.history()
    except (BadInput, OSError, ValueError) as error:
        facts.unreadable.append(f"{facts.workspace.ledger}: {error}")
        return History()


def _record(facts: Facts, step: str, kind: type[R]) -> R | None:
    path = facts.workspace.record(step)
    try:
        return kind.load(path) if path.is_file() else None
    except (BadInput, OSError) as error:
        facts.unreadable.append(str(error))
        return None


def _text(facts: Facts, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    except OSError as error:
        facts.unreadable.append(f"{path}: {error.strerror}")
        return ""


def _mapping(facts: Facts, path: Path, text: str) -> dict[str, Any]:
    try:
        content = json.loads(text) if path.suffix == ".json" and text else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        facts.unreadable.append(f"{path}: {error}")
        return {}
    return content if isinstance(content, dict) else {}

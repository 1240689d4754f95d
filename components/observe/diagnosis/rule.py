"""What a rule of the diagnosis is."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import singledispatchmethod
from typing import Any, Final

from pydantic import ValidationError

from steadytrain.components.shared.config import TrainingConfig
from steadytrain.components.shared.config.fields import power
from steadytrain.components.shared.events import Event
from steadytrain.components.shared.events.types import (
    Adjusted,
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    DataPrepared,
    DecisionMade,
    LayersMeasured,
    ProblemFound,
    SupervisorStarted,
    TrainingDiverged,
    TrainingStarted,
    TrainingStep,
    Validated,
)
from steadytrain.components.sizing.recipe import RATE

STEPS: Final = 1000
"""How many of the newest reported steps are kept."""
VALIDATIONS: Final = 200
FIRST: Final = 5
"""How many of the first losses are kept: what the run began with."""
RECENT: Final = 20
"""How many reported steps the rules about speed look at."""


class ObservedRun:
    """What happened in training, without the steps that a resumed attempt repeats.

    Its memory is bounded.

    attempt: the newest attempt.
    ready: its start of training.
    ended: its end; None while it runs.
    steps: the newest reported steps, of all attempts.
    first_losses: the losses of the first reported steps.
    validations: the newest validations, of all attempts.
    checkpoints: those of the newest attempt.
    layers: the newest measurements of layers.
    diverged: the steps at which training diverged.
    found: the problems that are reported already, by rule.
    rate: the peak learning rate by now, as a configuration states it; None if it is not known.

    Args:
        name: what names the run to a command (`Workspace.arguments`); "" if a person cannot adjust
            it.
    """

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.rate: float | None = None
        self.attempt: AttemptStarted | None = None
        self.ready: TrainingStarted | None = None
        self.ended: AttemptEnded | None = None
        self.steps: deque[TrainingStep] = deque(maxlen=STEPS)
        self.first_losses: list[float] = []
        self.validations: deque[Validated] = deque(maxlen=VALIDATIONS)
        self.checkpoints: list[CheckpointSaved] = []
        self.layers: deque[LayersMeasured] = deque(maxlen=RECENT)
        self.diverged: list[int] = []
        self.data: DataPrepared | None = None
        self.found: dict[str, ProblemFound] = {}
        self.adjusted: list[Adjusted] = []
        self._supervisor: SupervisorStarted | None = None

    @classmethod
    def of(cls, events: Iterable[Event], name: str = "") -> ObservedRun:
        """Return the run that events describe."""
        run = cls(name)
        for event in events:
            run.add(event)
        return run

    @property
    def recent(self) -> list[TrainingStep]:
        """The newest reports of the newest attempt, without its first one, which warms up."""
        return self.newest_attempt[1:][-RECENT:]

    @property
    def newest_attempt(self) -> list[TrainingStep]:
        """The reports of the newest attempt."""
        return [step for step in self.steps if step.attempt == self.steps[-1].attempt]

    @property
    def losses(self) -> list[TrainingStep]:
        """The reported steps whose loss is finite."""
        return [step for step in self.steps if math.isfinite(step.loss)]

    @property
    def peak_rate(self) -> float:
        """The highest learning rate so far; 0 before the first step."""
        return max((step.learning_rate for step in self.steps), default=0.0)

    @property
    def progress(self) -> float:
        """The share of the planned steps that is done."""
        if self.ready is None or not self.steps:
            return 0.0
        return self.steps[-1].step / self.ready.max_steps

    def setting(self, section: str, field: str) -> Any:
        """Return a field of the configuration that the newest supervisor uses, or None.

        What a person has changed while the run trains counts.
        """
        step = self.steps[-1].step if self.steps else 0
        for item in reversed(self.adjusted):
            if item.field == f"{section}.{field}" and item.step < max(step, 1):
                return item.value
        return self._supervisor.settings.get(section, {}).get(field) if self._supervisor else None

    @singledispatchmethod
    def add(self, event: Event) -> None:
        """Add an event. Ignore those that no rule looks at."""

    @add.register
    def _(self, event: SupervisorStarted) -> None:
        self._supervisor = event

    @add.register
    def _(self, event: DataPrepared) -> None:
        self.data = event

    @add.register
    def _(self, event: AttemptStarted) -> None:
        self.attempt, self.ready, self.ended = event, None, None
        self.checkpoints.clear()
        kept = event.resumed_from_step or 0
        self.steps = deque((step for step in self.steps if step.step <= kept), STEPS)
        self.validations = deque(
            (item for item in self.validations if item.step <= kept), VALIDATIONS
        )
        if not self.steps:
            self.first_losses.clear()

    @add.register
    def _(self, event: TrainingStarted) -> None:
        self.ready = event
        used = [float(item["value"]) for item in event.recipe if item["field"] == RATE]
        if self.rate is None and used:
            training = self._supervisor.settings.get("training") if self._supervisor else None
            # The rate stays unknown if the settings are damaged, or another version wrote them.
            with suppress(ValidationError):
                scale = TrainingConfig.model_validate(training).rate_scale if training else 1.0
                self.rate = used[0] / scale

    @add.register
    def _(self, event: Adjusted) -> None:
        self.adjusted.append(event)
        if event.field == RATE:
            self.rate = event.value

    @add.register
    def _(self, event: DecisionMade) -> None:
        if self.rate is not None:
            self.rate *= event.learning_rate_scale

    @add.register
    def _(self, event: AttemptEnded) -> None:
        self.ended = event

    @add.register
    def _(self, event: TrainingStep) -> None:
        self.steps.append(event)
        if len(self.first_losses) < FIRST and math.isfinite(event.loss):
            self.first_losses.append(event.loss)

    @add.register
    def _(self, event: Validated) -> None:
        self.validations.append(event)

    @add.register
    def _(self, event: CheckpointSaved) -> None:
        self.checkpoints.append(event)

    @add.register
    def _(self, event: LayersMeasured) -> None:
        self.layers.append(event)

    @add.register
    def _(self, event: TrainingDiverged) -> None:
        self.diverged.append(event.step)

    @add.register
    def _(self, event: ProblemFound) -> None:
        self.found.setdefault(event.rule, event)


@dataclass(frozen=True)
class Rule:
    """One problem that the diagnosis looks for.

    check: returns the evidence in a run, as a clause with numbers; "" if there is no problem or
        the events do not show it.
    meaning: what is wrong.
    remedy: what to do.
    source: paper or documentation that the rule follows.
    rate_factor: what to multiply the learning rate by; 0 if the advice is another one.
    """

    name: str
    check: Callable[[ObservedRun], str]
    meaning: str
    remedy: str
    source: str
    rate_factor: float = 0.0

    def advice(self, run: ObservedRun) -> str:
        """Return what to do, for a learning rate with its value and the command."""
        rate = run.rate
        if not self.rate_factor or rate is None:
            return self.remedy
        setting = f"training.learning_rate={power(float(f'{rate * self.rate_factor:.1e}'))}"
        if run.progress >= 1 or not run.name:
            return f"{self.remedy} Here: {setting} in the next run."
        return f"{self.remedy} Here: `steadytrain adjust {run.name} --set {setting}`."

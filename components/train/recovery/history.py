"""What a run's ledger contains: its attempts, the decisions, and what follows from them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

from steadytrain.components.shared.config import TrainingConfig
from steadytrain.components.shared.config.fields import Decision
from steadytrain.components.shared.events import Event
from steadytrain.components.shared.events.types import (
    Adjusted,
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    DecisionMade,
    SupervisorStarted,
    TrainingStarted,
    skipped,
)
from steadytrain.components.sizing.batch import BatchPlan
from steadytrain.components.sizing.recipe import RATE
from steadytrain.components.train.attempt import Change, changed, peak_of
from steadytrain.components.train.failures import FailureClass

State = (
    SupervisorStarted
    | AttemptStarted
    | TrainingStarted
    | AttemptEnded
    | CheckpointSaved
    | DecisionMade
    | Adjusted
)
"""The events that are state; other events only report."""


def is_of_rank(event: Event) -> TypeGuard[CheckpointSaved | TrainingStarted | DecisionMade]:
    """Return whether an event is state that a rank reports."""
    if isinstance(event, DecisionMade):
        return event.in_place
    return isinstance(event, CheckpointSaved | TrainingStarted)


@dataclass
class AttemptHistory:
    """One attempt.

    ready: its ranks were ready for their first step; None if they never got that far.
    ended: None while it runs, or if its supervisor died.
    waited: seconds that its pods waited for nodes, quota and images.
    repeats: what its ranks decided when they repeated a step.
    """

    started: AttemptStarted
    ready: TrainingStarted | None = None
    checkpoints: list[CheckpointSaved] = field(default_factory=list)
    ended: AttemptEnded | None = None
    waited: float = 0.0
    repeats: list[DecisionMade] = field(default_factory=list)

    def add(self, event: TrainingStarted | AttemptEnded | CheckpointSaved | DecisionMade) -> None:
        """Add an event of this attempt. A decision that it carried out itself changes its plan."""
        if isinstance(event, TrainingStarted):
            self.ready = event
        elif isinstance(event, DecisionMade):
            if event.in_place:
                self.started = self.started.changed_by(event)
                self.repeats.append(event)
        elif isinstance(event, AttemptEnded):
            self.ended = event
            self.waited = event.waited_seconds
        else:
            self.checkpoints.append(event)

    @property
    def skipped(self) -> float:
        """How far the clock was set forward during the attempt; 0 if unknown."""
        ended = self.ended
        return skipped(self.started.time, ended.time, ended.seconds) if ended else 0.0

    @property
    def plan(self) -> BatchPlan:
        """How the attempt splits the global batch, at its end or by now."""
        started = self.started
        return BatchPlan(started.batch, started.gradient_accumulation_steps, started.world_size)

    @property
    def last_step(self) -> int:
        """The newest step whose result still exists."""
        saved = [checkpoint.step for checkpoint in self.checkpoints]
        return max([self.started.resumed_from_step or 0, *saved])


@dataclass
class History:
    """The attempts and decisions in a ledger, in order.

    supervisor: the last one that took over the run.
    outdated: how many of the decisions predate the last change of `compute.nodes`.
    adjusted: what a person changed while the run trained, each with the number of decisions that
        predate it.
    """

    attempts: list[AttemptHistory] = field(default_factory=list)
    decisions: list[DecisionMade] = field(default_factory=list)
    supervisor: SupervisorStarted | None = None
    outdated: int = 0
    adjusted: dict[Adjusted, int] = field(default_factory=dict)

    @classmethod
    def of(cls, events: Iterable[State]) -> History:
        """Return the history of events, in their order."""
        history = cls()
        for event in events:
            history.add(event)
        return history

    def add(self, event: State) -> None:
        """Add the next event."""
        if isinstance(event, SupervisorStarted):
            if _other_nodes(self.supervisor, event):
                self.outdated = len(self.decisions)
            self.supervisor = event
        elif isinstance(event, AttemptStarted):
            self.attempts.append(AttemptHistory(event))
        elif isinstance(event, Adjusted):
            self.adjusted[event] = len(self.decisions)
        else:
            if isinstance(event, DecisionMade):
                self.decisions.append(event)
            # The start of this attempt may be one of the lost entries.
            for attempt in reversed(self.attempts):
                if attempt.started.attempt == event.attempt:
                    attempt.add(event)
                    break

    @property
    def next_attempt(self) -> int:
        return self.attempts[-1].started.attempt + 1 if self.attempts else 1

    @property
    def last_step(self) -> int:
        """The newest step whose result still exists; it decreases after a fallback."""
        return self.attempts[-1].last_step if self.attempts else 0

    @property
    def known_checkpoints(self) -> set[str]:
        """Labels of those that the last supervisor found, and names of those saved since."""
        checkpoints = set((self.supervisor.checkpoints or []) if self.supervisor else [])
        saved = (item for attempt in self.attempts for item in attempt.checkpoints)
        return checkpoints | {item.checkpoint.rpartition("/")[2] for item in saved}

    @property
    def planned_steps(self) -> int | None:
        """The steps that training is to take; None if no attempt has got that far."""
        planned = [attempt.ready.max_steps for attempt in self.attempts if attempt.ready]
        return planned[-1] if planned else None

    @property
    def limit(self) -> DecisionMade | None:
        """The decision whose batch settings still apply."""
        limits = [item for item in self.decisions if item.batch is not None]
        return limits[-1] if limits else None

    @property
    def shortened(self) -> DecisionMade | None:
        """The decision that shortened the sequences the most; None if they have full length."""
        limit = self.limit
        return limit if limit and limit.batch and limit.batch.sequence_length else None

    @property
    def nodes(self) -> int | None:
        """The number of nodes of the next attempt, if some have gone missing.

        None if none has since `compute.nodes` last changed.
        """
        current = self.decisions[self.outdated :]
        return next((item.nodes for item in reversed(current) if item.nodes), None)

    @property
    def configured_nodes(self) -> int | None:
        """The configured number of nodes, as the last supervisor recorded it."""
        settings = self.supervisor.settings if self.supervisor else {}
        nodes: int | None = settings.get("compute", {}).get("nodes")
        return nodes

    def grows(self, attempt: int) -> bool:
        """Return whether an attempt tries nodes again that an earlier one had to do without."""
        return any(
            item.nodes and not _shrinks(item) and item.attempt + 1 == attempt
            for item in self.decisions[self.outdated :]
        )

    @property
    def on_demand(self) -> bool:
        """Whether the next attempt avoids preemptible nodes."""
        last = self.decisions[-1] if self.decisions else None
        return bool(last and last.on_demand and last.attempt + 1 == self.next_attempt)

    @property
    def skipped_batches(self) -> tuple[int, ...]:
        """The skipped global batches, in order."""
        batches = {item.skipped_batch for item in self.decisions if item.skipped_batch is not None}
        return tuple(sorted(batches))

    @property
    def learning_rate_scale(self) -> float:
        """The factor applied to the schedule's learning rates."""
        return self._scale_since(0)

    def _scale_since(self, first: int) -> float:
        return math.prod(item.learning_rate_scale for item in self.decisions[first:])

    @property
    def changes(self) -> tuple[Change, ...]:
        """What a person set: after which step it counts, the field, and the value.

        A learning rate replaces what decisions before it have lowered, and later ones lower it.
        """
        return tuple(
            (
                item.step,
                item.field,
                item.after * self._scale_since(first) if item.field == RATE else item.after,
            )
            for item, first in self.adjusted.items()
        )

    def settings(self, training: TrainingConfig, step: int) -> TrainingConfig:
        """Return configured settings as they are for the step after `step` finished ones."""
        return changed(training, self.changes, step)

    def replaced_from(self, step: int, field: str) -> list[Adjusted]:
        """Return the changes of a field that another one after `step` steps would replace."""
        changes = [item for item in self.adjusted if item.field == field]
        return [
            item
            for index, item in enumerate(changes)
            if item.step > step and not any(it.step <= item.step for it in changes[index + 1 :])
        ]

    def peak(self, step: int, configured: float) -> float:
        """Return the schedule's peak for the step that follows `step` finished ones."""
        return peak_of(self.changes, step, configured * self.learning_rate_scale)

    @property
    def recipe(self) -> list[Decision]:
        """The recipe of the first attempt that was ready to train; later attempts keep it."""
        recipes = (attempt.ready.recipe for attempt in self.attempts if attempt.ready)
        return [Decision(**item) for item in next(recipes, [])]

    @property
    def decided(self) -> list[Decision]:
        """All decisions with a reason.

        They are the recipe, what a person changed, and how the newest attempt splits the work.
        """
        cut = self.attempts[-1].started.decisions if self.attempts else []
        changed = (
            Decision(item.field, item.value, f"{item.change}, by steadytrain adjust", yours=True)
            for item in self.adjusted
        )
        return [*self.recipe, *changed, *(Decision(**item) for item in cut)]

    @property
    def stalled(self) -> list[AttemptHistory]:
        """The last attempts, starting with the newest that made progress or that a person started.

        The attempt that made progress is included, because it failed after it saved. After a
        fallback to an older checkpoint the same steps are saved a second time. That counts as
        progress, but a third time does not: storage that damages every checkpoint must not keep a
        run busy forever. A person who restarts a stopped run has dealt with the cause, so the list
        starts over.
        """
        stops = {item.attempt for item in self.decisions if item.action == "stop"}
        saves = Counter[int]()
        first = 0
        for index, attempt in enumerate(self.attempts):
            if index and self.attempts[index - 1].started.attempt in stops:
                first = index
            for step in {item.step for item in attempt.checkpoints}:
                saves[step] += 1
                if step > (attempt.started.resumed_from_step or 0) and saves[step] <= 2:
                    first = index
        return self.attempts[first:]

    @property
    def answered(self) -> set[int]:
        """The attempts whose failure led to an OOM fallback or fewer nodes, and costs no retry."""
        return {
            item.attempt
            for item in self.decisions
            if (item.fallback and not item.in_place) or _shrinks(item)
        }

    @property
    def checkpoint_seconds(self) -> tuple[float, float] | None:
        """The blocking and writing seconds of the newest checkpoint; None before the first one."""
        saved = [item for attempt in self.attempts for item in attempt.checkpoints]
        return (saved[-1].seconds, saved[-1].writing_seconds) if saved else None

    @property
    def seconds(self) -> float:
        """The total duration of the ended attempts, without the waits of their pods."""
        return sum(
            max(
                0.0,
                (attempt.ended.seconds or attempt.ended.time - attempt.started.time)
                - attempt.waited,
            )
            for attempt in self.attempts
            if attempt.ended
        )


def _shrinks(decision: DecisionMade) -> bool:
    """Return whether a decision is to do without nodes that are missing."""
    return bool(decision.nodes) and decision.failure_class == FailureClass.PENDING_TIMEOUT


def _other_nodes(before: SupervisorStarted | None, now: SupervisorStarted) -> bool:
    """Return whether the configured number of nodes changed."""
    if before is None:
        return False
    old, new = (item.settings.get("compute", {}).get("nodes") for item in (before, now))
    return old is not None and new is not None and old != new


def account(history: History) -> Sequence[str]:
    """Return a line for each attempt since the last new checkpoint, and the last stop's reason.

    Empty for a single attempt, or if the run was never stopped by a decision.
    """
    lines = [_attempt(attempt) for attempt in history.stalled]
    earlier = len(history.attempts) - len(lines)
    if earlier:
        lines.insert(0, f"{earlier} earlier attempts, before the last new checkpoint")
    decided = [item for item in history.decisions if item.action == "stop"]
    if len(lines) < 2 or not decided:
        return ()
    return [*lines, f"stopped: {decided[-1].reason}"]


def _attempt(attempt: AttemptHistory) -> str:
    started, ended = attempt.started, attempt.ended
    text = f"attempt {started.attempt}: micro-batch x accumulation {attempt.plan}, "
    text += f"from step {started.resumed_from_step or 0}"
    if ended is None:
        return text
    why = f": {ended.failure_class}, {ended.message.partition(chr(10))[0]}" if ended.message else ""
    return f"{text}, {ended.outcome} at step {ended.step}{why}"

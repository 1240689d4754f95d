"""What a run's ledger tells: its attempts, what was decided, and what follows from both."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from steadytrain.components.shared.decision import Decision
from steadytrain.components.shared.events.types import (
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    DecisionMade,
    SupervisorStarted,
    TrainingStarted,
)
from steadytrain.components.train.plan.batch import BatchPlan
from steadytrain.components.train.recovery.entries import Entry


@dataclass
class AttemptHistory:
    """One attempt.

    ready: its ranks could take their first step; None where they did not come to that.
    ended: None while it runs, or where its supervisor died.
    """

    started: AttemptStarted
    ready: TrainingStarted | None = None
    checkpoints: list[CheckpointSaved] = field(default_factory=list)
    ended: AttemptEnded | None = None

    def add(self, event: TrainingStarted | AttemptEnded | CheckpointSaved) -> None:
        """Takes in what became of it."""
        if isinstance(event, TrainingStarted):
            self.ready = event
        elif isinstance(event, AttemptEnded):
            self.ended = event
        else:
            self.checkpoints.append(event)

    @property
    def plan(self) -> BatchPlan:
        """How it cut the global batch."""
        started = self.started
        return BatchPlan(
            started.micro_batch_size,
            started.gradient_accumulation_steps,
            started.world_size,
            started.gradient_checkpointing,
            started.snapshot,
            started.strategy,
            started.offload,
        )

    @property
    def last_step(self) -> int:
        """The newest step of which something is left."""
        saved = [checkpoint.step for checkpoint in self.checkpoints]
        return max([self.started.resumed_from_step or 0, *saved])


@dataclass
class History:
    """What the ledger tells, attempts and decisions in their order.

    generation: of the last supervisor that wrote.
    supervisor: the last one that took the run over.
    outdated: how many of the decisions came before `compute.nodes` was changed.
    """

    attempts: list[AttemptHistory] = field(default_factory=list)
    decisions: list[DecisionMade] = field(default_factory=list)
    generation: int = 0
    supervisor: SupervisorStarted | None = None
    outdated: int = 0

    @property
    def next_attempt(self) -> int:
        return self.attempts[-1].started.attempt + 1 if self.attempts else 1

    @property
    def last_step(self) -> int:
        """The newest step of which something is left; less than before after a fallback."""
        return self.attempts[-1].last_step if self.attempts else 0

    @property
    def limit(self) -> DecisionMade | None:
        """The decision whose micro-batch, activation checkpointing and snapshot hold on."""
        limits = [item for item in self.decisions if item.micro_batch_size is not None]
        return limits[-1] if limits else None

    @property
    def nodes(self) -> int | None:
        """How many are left, where some stayed away since `compute.nodes` was last changed."""
        current = self.decisions[self.outdated :]
        return next((item.nodes for item in reversed(current) if item.nodes), None)

    @property
    def on_demand(self) -> bool:
        """Whether the next attempt does without nodes that may be taken away."""
        last = self.decisions[-1] if self.decisions else None
        return bool(last and last.on_demand and last.attempt + 1 == self.next_attempt)

    @property
    def skipped_batches(self) -> tuple[int, ...]:
        """Global batches that are left out, in their order."""
        found = {item.skipped_batch for item in self.decisions if item.skipped_batch is not None}
        return tuple(sorted(found))

    @property
    def learning_rate_scale(self) -> float:
        """Factor on the schedule's rates."""
        return math.prod(item.learning_rate_scale for item in self.decisions)

    @property
    def recipe(self) -> list[Decision]:
        """As the first attempt that could take a step had it; later ones hold to it."""
        told = (attempt.ready.recipe for attempt in self.attempts if attempt.ready)
        return [Decision(**item) for item in next(told, [])]

    @property
    def decided(self) -> list[Decision]:
        """What has a reason: the recipe, and how the newest attempt cuts the work."""
        cut = self.attempts[-1].started.decisions if self.attempts else []
        return [*self.recipe, *(Decision(**item) for item in cut)]

    @property
    def stalled(self) -> list[AttemptHistory]:
        """The last attempts, from the newest that made progress, or that a person asked for.

        The one that made progress belongs to them, since it failed after it had saved. After a
        fallback to an older checkpoint the same steps are saved once more, which counts, but not
        a third time: storage that damages each checkpoint must not keep a run busy forever.
        Whoever starts the run again after a stop has dealt with the cause: that begins anew.
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
    def checkpoint_seconds(self) -> tuple[float, float] | None:
        """What the newest checkpoint cost, blocking and writing; None before there is one."""
        saved = [item for attempt in self.attempts for item in attempt.checkpoints]
        return (saved[-1].seconds, saved[-1].writing_seconds) if saved else None

    @property
    def seconds(self) -> float:
        """Time that ended attempts took."""
        return sum(
            attempt.ended.time - attempt.started.time for attempt in self.attempts if attempt.ended
        )


def history_of(entries: Iterable[Entry]) -> History:
    """The history that a ledger's entries tell; those without an event are left out."""
    history, attempts = History(), dict[int, AttemptHistory]()
    for entry in entries:
        event = entry.event
        if event is None or entry.generation < history.generation:
            continue
        history.generation = entry.generation
        if isinstance(event, SupervisorStarted):
            if _other_nodes(history.supervisor, event):
                history.outdated = len(history.decisions)
            history.supervisor = event
        elif isinstance(event, DecisionMade):
            history.decisions.append(event)
        elif isinstance(event, AttemptStarted):
            attempts[event.attempt] = AttemptHistory(event)
        elif (
            isinstance(event, TrainingStarted | AttemptEnded | CheckpointSaved)
            # Its attempt may be among what was lost.
            and event.attempt in attempts
        ):
            attempts[event.attempt].add(event)
    history.attempts = list(attempts.values())
    return history


def _other_nodes(before: SupervisorStarted | None, now: SupervisorStarted) -> bool:
    """Whether the configuration asks for another number of nodes than it did."""
    if before is None:
        return False
    old, new = (item.settings.get("compute", {}).get("nodes") for item in (before, now))
    return old is not None and new is not None and old != new

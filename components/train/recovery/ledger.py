"""The record of a run's attempts, from which any supervisor rebuilds what it must know.

One small JSON object an event, written once under a name that sorts. It alone
holds the state: a supervisor that dies takes nothing with it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any, Final

from steadytrain.components.shared.decision import Decision
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.events import Event
from steadytrain.components.shared.events.types import (
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    DecisionMade,
    SupervisorStarted,
    TrainingStarted,
    from_json,
    to_json,
)
from steadytrain.components.shared.storage import Storage
from steadytrain.components.train.lease import Lease
from steadytrain.components.train.plan.batch import BatchPlan

SCHEMA_VERSION: Final = 1
KEPT = (
    SupervisorStarted
    | AttemptStarted
    | TrainingStarted
    | AttemptEnded
    | CheckpointSaved
    | DecisionMade
)
"""The events that are state; the rest of the stream is only told."""


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
    """

    attempts: list[AttemptHistory] = field(default_factory=list)
    decisions: list[DecisionMade] = field(default_factory=list)
    generation: int = 0
    supervisor: SupervisorStarted | None = None

    @property
    def next_attempt(self) -> int:
        return self.attempts[-1].started.attempt + 1 if self.attempts else 1

    @property
    def last_step(self) -> int:
        """The newest step of which something is left."""
        return max((attempt.last_step for attempt in self.attempts), default=0)

    @property
    def limit(self) -> DecisionMade | None:
        """The decision whose micro-batch, activation checkpointing and snapshot hold on."""
        limits = [item for item in self.decisions if item.micro_batch_size is not None]
        return limits[-1] if limits else None

    @property
    def nodes(self) -> int | None:
        """How many are left, where some stayed away."""
        return next((item.nodes for item in reversed(self.decisions) if item.nodes), None)

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
        """The last attempts, from the newest that saved further than all before it.

        That one belongs to them, since it failed after it had saved.
        """
        furthest, first = 0, 0
        for index, attempt in enumerate(self.attempts):
            saved = max((item.step for item in attempt.checkpoints), default=0)
            if saved > furthest:
                furthest, first = saved, index
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


class Ledger:
    """Writes and reads the events of one run.

    lease: what the writer holds; a reader needs none.
    """

    def __init__(self, storage: Storage, *, run_id: str) -> None:
        self.storage, self.run_id = storage, run_id
        self.lease: Lease | None = None
        # Listed once: a long run's ledger has thousands of events.
        self._next = 0

    def record(self, event: Event) -> None:
        """Keeps an event that is state; others are passed over.

        Raises:
            StorageError: it cannot be written.
            RunBusy: another supervisor has taken the run over.
        """
        if not isinstance(event, KEPT):
            return
        if self.lease is not None:
            self.lease.fence()
        content = {
            "schema_version": SCHEMA_VERSION,
            "generation": self.lease.generation if self.lease else 0,
            **json.loads(to_json(event, job_id=self.run_id)),
        }
        body = json.dumps(content).encode()
        if not self._next:
            names = self.storage.list()
            self._next = int(names[-1].removesuffix(".json")) + 1 if names else 1
        # Another writer may take the number first; each event keeps a name of its own.
        while not self.storage.write(f"{self._next:08d}.json", body, if_absent=True):
            self._next += 1
        self._next += 1

    def history(self) -> History:
        """Everything so far.

        What a supervisor has still written after another had taken over is left out: it may
        have been stopped for long between its look at the lease and its writing.

        Raises:
            BadInput: the ledger was written by a newer version.
        """
        history, attempts = History(), dict[int, AttemptHistory]()
        for name in self.storage.list():
            event, generation = self._read(name)
            if generation < history.generation:
                continue
            history.generation = generation
            if isinstance(event, SupervisorStarted):
                history.supervisor = event
            elif isinstance(event, DecisionMade):
                history.decisions.append(event)
            elif isinstance(event, AttemptStarted):
                attempts[event.attempt] = AttemptHistory(event)
            elif isinstance(event, TrainingStarted):
                attempts[event.attempt].ready = event
            elif isinstance(event, AttemptEnded):
                attempts[event.attempt].ended = event
            elif isinstance(event, CheckpointSaved):
                attempts[event.attempt].checkpoints.append(event)
        history.attempts = list(attempts.values())
        return history

    def _read(self, name: str) -> tuple[Event, int]:
        """An event and the generation of who wrote it."""
        body = self.storage.read(name)
        content: dict[str, Any] = json.loads(body)
        if content.get("schema_version") != SCHEMA_VERSION:
            raise BadInput(
                f"{self.storage.uri}/{name} has schema version {content.get('schema_version')}; "
                f"this steadytrain reads {SCHEMA_VERSION}",
                remedy="install the version that wrote it, or use another run name",
            )
        return from_json(body.decode()), int(content.get("generation", 0))

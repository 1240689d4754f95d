"""A real run of the product's own command, with faults from outside until the last one is done."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from steadytrain.components.shared.events import Cursor
from steadytrain.components.shared.events.types import (
    AttemptStarted,
    CheckpointSaved,
    TrainingStarted,
)
from steadytrain.components.train.agent.processes import end_processes
from steadytrain.components.train.recovery.times import Span, Times

from support.disturbances import Disturbance, Scene, memory_short
from support.times import told_spans

_POLL_SECONDS = 0.2
_ENDS_NOTHING = {"tracking killed", "clock set"}


@dataclass(frozen=True)
class Struck:
    """An injected fault: its name, the attempt, and the seconds since the start."""

    name: str
    attempt: int
    after: float


class Soak:
    """Injects one fault after another, with training progress between them.

    Args:
        every: minimum seconds between two faults.
        pace: file that keeps the steps slow; deleted with the last fault.
    """

    def __init__(self, scene: Scene, plan: Sequence[Disturbance], every: float, pace: Path) -> None:
        self.scene, self.plan, self.every, self.pace = scene, list(plan), every, pace
        self.struck: list[Struck] = []
        self._cursor = Cursor(scene.workspace.events)
        self._ready, self._saved, self._needed = 0, 0, 0
        self._not_before = float("inf")

    def run(self, deadline_seconds: float) -> int:
        """Run the command until it exits by itself, and return its exit status.

        Its remaining processes are killed.
        """
        began = last = time.monotonic()
        self.scene.program.start()
        try:
            while (status := self.scene.program.status) is None:
                assert time.monotonic() - began < deadline_seconds, "it takes too long"
                time.sleep(_POLL_SECONDS)
                self._look()
                if self.plan and self._due(last):
                    last = time.monotonic()
                    self._strike(last - began)
            return status
        finally:
            self.scene.program.kill()
            end_processes(self.scene.workspace.attempts)

    def _due(self, last: float) -> bool:
        """Return whether to inject a fault now.

        Wait a random time after a checkpoint: a fault right after one would flatter the run.
        """
        if not self._under_way:
            self._not_before = float("inf")
            return False
        now = time.monotonic()
        if self._not_before == float("inf"):
            self._not_before = now + self.scene.draw.uniform(0, self.every / 12)
        return now >= max(self._not_before, last + self.every)

    @property
    def _under_way(self) -> bool:
        """Whether the current attempt has saved a later step than the attempts before it."""
        return self._ready == self.scene.attempt and self._saved > self._needed

    def _look(self) -> None:
        for event in self._cursor.new():
            if isinstance(event, AttemptStarted):
                self.scene.attempt = event.attempt
            elif isinstance(event, TrainingStarted):
                self._ready = event.attempt
            elif isinstance(event, CheckpointSaved) and event.attempt == self.scene.attempt:
                self._saved = max(self._saved, event.step)
        if self._under_way and self.scene.memory.limit:
            for rank in range(self.scene.ranks):
                self.scene.memory.keep(self.scene.pid(rank))

    def _strike(self, after: float) -> None:
        disturbance, attempt = self.plan.pop(0), self.scene.attempt
        name = disturbance.__name__.replace("_", " ")
        print(f"{after:6.0f} s  attempt {attempt}, saved at step {self._saved}: {name}", flush=True)
        self._needed = self._saved
        disturbance(self.scene)
        self.struck.append(Struck(name, attempt, after))
        if not self.plan:
            self.pace.unlink()


def schedule(
    draw: random.Random, kinds: Sequence[Disturbance], count: int, *, memory: int = 0
) -> list[Disturbance]:
    """Return all kinds in shuffled rounds, with `memory` shortages spread evenly between them."""
    plan: list[Disturbance] = []
    while len(plan) < count - memory:
        plan += draw.sample(kinds, len(kinds))
    del plan[count - memory :]
    for number in range(memory):
        plan.insert((number * count + count // 2) // max(memory, 1), memory_short)
    return plan


def table(scene: Scene, struck: Sequence[Struck]) -> str:
    """Format the faults, what each cost by the ledger's times, and where the run's time went.

    The cost of a fault is the lost work of its attempt, the wait, and the start of the next
    attempt.
    """
    cut = told_spans(scene.workspace)
    rows = [
        (fault, _cost(cut, fault.attempt)) for fault in struck if fault.name not in _ENDS_NOTHING
    ]
    head = f"{'at':>7}  {'attempt':>7}  {'fault':<20} {'lost':>7} {'waiting':>7} {'restart':>7}"
    lines = [head]
    for fault, cost in rows:
        lines.append(
            f"{fault.after:6.0f}s  {fault.attempt:>7}  {fault.name:<20} "
            f"{cost.lost:6.1f}s {cost.waiting:6.1f}s {cost.restarting:6.1f}s"
        )
    for name in dict.fromkeys(fault.name for fault in struck):
        costs = [cost.wall for fault, cost in rows if fault.name == name]
        times = sum(fault.name == name for fault in struck)
        told = f"median {statistics.median(costs):.1f} s" if costs else "no attempt ended by it"
        lines.append(f"{name}: {times} times, {told}")
    times = Times.of(cut)
    shares = ", ".join(f"{kind} {seconds:.1f} s" for kind, seconds in asdict(times).items())
    lines.append(f"{times.wall:.0f} s: {shares}")
    lines.append(f"goodput: {times.goodput:.1%} with {len(struck)} faults")
    return "\n".join(lines)


def _cost(cut: Sequence[Span], attempt: int) -> Times:
    return Times.of(
        span
        for span in cut
        if (span.attempt == attempt and span.kind == "lost")
        or (span.attempt == attempt + 1 and span.kind in ("waiting", "restarting"))
    )

"""What pieces of work cost on one thread: CPU time in turns, and the peak of live tensors."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from steadytrain.components.memory.random_model import LiveTensors

Work = Callable[[], object]


@dataclass(frozen=True)
class Timed:
    """CPU seconds of a piece of work in each round, and the peer's in the same rounds."""

    seconds: list[float]
    peer: list[float]

    @property
    def ratios(self) -> list[float]:
        """By round, sorted."""
        return sorted(own / other for own, other in zip(self.seconds, self.peer, strict=True))

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    def __str__(self) -> str:
        return f"x {self.ratio:.2f} ({self.ratios[0]:.2f} to {self.ratios[-1]:.2f})"


def in_turns(
    works: Mapping[str, Work], rounds: int, *, before: Mapping[str, Work] | None = None
) -> dict[str, Timed]:
    """Measure each work once per round, after a round that does not count. The first is the peer.

    Args:
        before: what to do before each time, unmeasured.
    """
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds + 1):
        for name, work in works.items():
            if before is not None:
                before[name]()
            began = time.process_time()
            work()
            seconds[name].append(time.process_time() - began)
    counted = {name: each[1:] for name, each in seconds.items()}
    peer = next(iter(counted.values()))
    return {name: Timed(each, peer) for name, each in counted.items()}


def peak_beside(held: Iterable[torch.Tensor], work: Work) -> int:
    """Return the peak bytes of the live tensors that work adds to those that exist already."""
    with LiveTensors() as live:
        for tensor in held:
            live.see(tensor, "held")
        before = live.bytes
        work()
    return max(live.peak - before, 0)

"""What the log concludes from events: known problems, each under its own name.

They are in the log only. Events stay as they are, so the same conclusions follow from them again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from steadytrain.components.shared.events import Event
from steadytrain.components.shared.events.types import AttemptEnded, Level, TrainingStep

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
    "An attempt ran out of device memory (failure class gpu_oom).",
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

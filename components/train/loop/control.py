"""Requests to stop: signals to this process, the attempt's stop file, and its cut.

A request is only recorded. The ranks agree on it in a reduction that each step performs anyway, so
all of them stop at the same step.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.events.types import AttemptOutcome
from steadytrain.components.shared.foreign import ran_out
from steadytrain.components.shared.storage.local import Awaited

OUTCOMES: Final[tuple[AttemptOutcome, ...]] = ("preempted", "stopped", "pruned")
"""Outcomes that a request can ask for. With several requests, the first in this list wins."""

_SIGNALS: dict[int, AttemptOutcome] = {signal.SIGTERM: "preempted", signal.SIGINT: "stopped"}


class StopRequests:
    """The requests that have reached this process.

    Args:
        file: the attempt's stop file, on the one rank that watches it; None on all others.
    """

    def __init__(self, file: Path | None) -> None:
        self.file = Awaited(file) if file else None
        self.received: set[AttemptOutcome] = set()
        self.until: int | None = None

    def listen(self) -> None:
        """Treat SIGTERM as a preemption and SIGINT as a stop."""
        for number in _SIGNALS:
            signal.signal(number, self._note)

    def cut_at(self, until: int | None, *, eval_steps: int, steps: int) -> None:
        """Stop as pruned after a step, on every rank. None means there is no cut.

        Args:
            until: optimizer steps; from `steps` on, it cuts nothing.
            eval_steps: as in the configuration.
            steps: of the full training run.

        Raises:
            BadInput: the step is not validated. A cut must not add a validation, because early
                stopping and the choice of the best model depend on all of them.
        """
        if until is not None and until < steps and until % eval_steps:
            raise BadInput(
                f"until = {until}: a run is cut where it is validated, and training.eval_steps is "
                f"{eval_steps}",
                remedy=f"use a multiple of {eval_steps}, or {steps} for the whole run",
            )
        self.until = until

    def flags(self, step: int = 0) -> list[int]:
        """Return 1 for each of OUTCOMES that was requested, 0 for the others.

        Args:
            step: optimizer steps done.
        """
        if self.until is not None and step >= self.until:
            self.received.add("pruned")
        # Storage that cannot be read now is looked at again after the next step.
        with contextlib.suppress(OSError):
            if self.file is not None and self.file.there():
                asked = self.file.path.read_text()
                self.received.add("pruned" if asked.strip() == "pruned" else "stopped")
        return [int(outcome in self.received) for outcome in OUTCOMES]

    def requested_outcome(self, step: int) -> AttemptOutcome | None:
        """Return the outcome that this process was asked for after a step, or None."""
        flags = self.flags(step)
        return next((name for name, flag in zip(OUTCOMES, flags, strict=True) if flag), None)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.received.add(_SIGNALS[number])


class StoppedEarly(Exception):
    """The ranks were asked to stop before the first step. What they had found is stored."""

    def __init__(self, outcome: AttemptOutcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


@dataclass(frozen=True)
class Watch:
    """What a rank does while it waits for the other model.

    beat: records a sign of life.
    flags: returns 1 for each of `OUTCOMES` that this rank was asked for.
    progress: reports what is being done, rows done, and all rows, on rank 0.
    warn: reports something odd, on rank 0.
    split: reports, on each rank, that batches have fewer rows, and how many they had.
    """

    beat: Callable[[], None] = lambda: None
    flags: Callable[[], list[int]] = lambda: [0] * len(OUTCOMES)
    progress: Callable[[str, int, int], None] = lambda _work, _done, _total: None
    warn: Callable[[str], None] = lambda _message: None
    split: Callable[[str, int, int], None] = lambda _work, _rows, _instead_of: None


@contextmanager
def memory_for(field: str, address: str | None) -> Iterator[None]:
    """Name the other model if memory is too small for it.

    That is bad input: no OOM fallback of the training changes what this model needs.

    Args:
        field: names the address in the error.

    Raises:
        BadInput: memory ran out.
    """
    try:
        yield
    except Exception as error:
        if not ran_out(error):
            raise
        reason = str(error).partition("\n")[0]
        raise BadInput(
            f"{field} = {address!r}: {reason}",
            remedy="use a smaller model there, training.bf16, a smaller data.sequence_length, or a "
            "device with more memory; the training itself has not started",
        ) from error


def requested_outcome(flags: Sequence[Sequence[int]]) -> AttemptOutcome | None:
    """Return what any rank was asked for, from the flags of all; None if none was asked."""
    votes = zip(OUTCOMES, zip(*flags, strict=True), strict=True)
    return next((outcome for outcome, asked in votes if any(asked)), None)

"""What a rank does while another model works on the training rows, before the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.events.types import AttemptOutcome
from steadytrain.components.shared.foreign import ran_out
from steadytrain.components.train.loop.control import OUTCOMES


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
        said = str(error).partition("\n")[0]
        raise BadInput(
            f"{field} = {address!r}: {said}",
            remedy="use a smaller model there, training.bf16, a smaller data.sequence_length, or a "
            "device with more memory; the training itself has not started",
        ) from error


def requested_outcome(flags: Sequence[Sequence[int]]) -> AttemptOutcome | None:
    """Return what any rank was asked for, from the flags of all; None if none was asked."""
    votes = zip(OUTCOMES, zip(*flags, strict=True), strict=True)
    return next((outcome for outcome, asked in votes if any(asked)), None)

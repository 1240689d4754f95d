"""Rows that a model works on together, and fewer of them where memory runs out.

This is for models that only answer: an out-of-memory error ends nothing but the pass that raised
it, and no other rank takes part in that pass. Where a batch is split depends on its rows and on the
memory alone, not on the batches before it, so ranks with equal devices split alike.

If the kernel kills the process instead, because host memory ran out, nothing here can help.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final, TypeVar

from steadytrain.components.shared.foreign import OutOfMemory, ran_out

T = TypeVar("T")
R = TypeVar("R")

Notify = Callable[[str, int, int], None]
"""Called with what is being done, the number of rows of a batch, and what it was before."""
_REMEDY: Final = "use a device with more memory, or a smaller data.sequence_length"


@dataclass
class _Work:
    """What is being done, and what did not fit.

    failed: number of rows, and length of the longest.
    least: fewest rows that `notify` was called with.
    """

    name: str
    notify: Notify
    failed: list[tuple[int, int]] = field(default_factory=list)
    least: float = float("inf")

    def hopeless(self, rows: int, longest: int) -> bool:
        """Return whether something smaller, or the same, did not fit."""
        return any(rows >= count and longest >= length for count, length in self.failed)

    def shrink(self, rows: int, instead_of: int) -> None:
        if rows < self.least:
            self.least = rows
            self.notify(self.name, rows, instead_of)


_work: ContextVar[_Work | None] = ContextVar("_work", default=None)


@contextlib.contextmanager
def splitting(name: str, notify: Notify | None = None) -> Iterator[None]:
    """Within this context, `fitted` remembers what did not fit.

    Args:
        name: what is being done, such as "scoring the training rows".
        notify: called whenever batches get smaller; by default, what the surrounding context
            calls.
    """
    outer = _work.get()
    notify = notify or (outer.notify if outer else lambda _name, _rows, _instead_of: None)
    token = _work.set(_Work(name, notify))
    try:
        yield
    finally:
        _work.reset(token)


def batched(
    work: Callable[[Sequence[T]], Sequence[R]],
    rows: Sequence[T],
    size: int,
    length: Callable[[T], int],
) -> list[R]:
    """Return what `work` returns for each row, `size` rows at a time, or as many as fit.

    Args:
        length: returns the number of tokens of a row.

    Raises:
        OutOfMemory: one row alone does not fit.
    """
    starts = range(0, len(rows), size)
    return [one for start in starts for one in fitted(work, rows[start : start + size], length)]


def fitted(
    work: Callable[[Sequence[T]], Sequence[R]], rows: Sequence[T], length: Callable[[T], int]
) -> list[R]:
    """Return what `work` returns for each row, of all rows together, or of as many as fit.

    Args, Raises: as for `batched`.
    """
    doing = _work.get() or _Work("the model", lambda _name, _rows, _instead_of: None)
    return _halved(work, rows, length, doing, len(rows))


def _halved(
    work: Callable[[Sequence[T]], Sequence[R]],
    rows: Sequence[T],
    length: Callable[[T], int],
    doing: _Work,
    whole: int,
) -> list[R]:
    """Work on all rows; if that does not fit, on the first half and then on the second."""
    longest, reason = max(map(length, rows)), ""
    if len(rows) == 1 or not doing.hopeless(len(rows), longest):
        try:
            return list(work(rows))
        except Exception as error:
            if not ran_out(error):
                raise
            reason = str(error).partition("\n")[0]
        # Only now: until here, the error held the tensors of the pass that failed.
        release_memory()
        doing.failed.append((len(rows), longest))
    if len(rows) == 1:
        raise OutOfMemory(
            f"{doing.name}: one row of {longest} tokens does not fit in memory: {reason}",
            remedy=_REMEDY,
        )
    half = (len(rows) + 1) // 2
    doing.shrink(half, whole)
    return [
        one
        for part in (rows[:half], rows[half:])
        for one in _halved(work, part, length, doing, whole)
    ]


def release_memory() -> None:
    """Return to the device what nothing uses any more."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()

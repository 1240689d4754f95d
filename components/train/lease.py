"""The lease: which supervisor owns a run, decided by conditional writes to storage.

The lease is a row of numbered objects (storage/row.py). The object with the highest number holds
the run, and that number is the generation, which fences the ledger and the checkpoints against
earlier supervisors. Checking the lease before each write avoids most conflicts. If a write still
comes too late, readers recognize it by its generation and ignore it (recovery/ledger.py,
checkpoint/lineage.py).

The holder keeps renewing its object. A process that sees it unchanged for the full lease time, by
its own clock, may claim the next number. An agent gives up after half of that time and takes its
ranks down within the other half, so two supervisors never train at once.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal

import psutil
from pydantic import ValidationError

from steadytrain.components.shared.errors import BadInput, RunBusy, StorageError, Unreadable
from steadytrain.components.shared.identity import Identity
from steadytrain.components.shared.quantities import duration
from steadytrain.components.shared.renewal import RENEWALS, Pulse, Renewed
from steadytrain.components.shared.storage import Storage
from steadytrain.components.shared.storage.row import Row

_LOOKS = 20
"""Number of times an agent checks the lease per lease time."""
_POLL_SECONDS = 0.1
_log = logging.getLogger(__name__)
Held = Literal["run", "study"]
"""What a lease is for."""
_HOLDERS: Final = {"run": ("trained", "supervisor"), "study": ("driven", "driver")}
"""What the holder does with it, and what the holder is."""


class Holder(Identity):
    """Who holds or held a run.

    renewed: number of renewals so far.
    until: when the lease expires unless it is renewed, by the holder's clock. It is shown to
        people, and `held` uses it for its guess.
    released: whether the holder released the run.
    """

    renewed: int = 0
    until: float = 0.0
    released: bool = False

    def working(self) -> bool | None:
        """Return whether the holder is working on the run; None if this machine cannot tell."""
        if self.released:
            return False
        working, process = self.alive(), self.process()
        with contextlib.suppress(psutil.NoSuchProcess):
            stopped = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
            if process is not None and process.status() in stopped:
                return None
        return working


class Generations(Row):
    """The numbered objects of a run's lease."""

    prefix = "generation-"
    digits = 8

    def names(self) -> Sequence[str]:
        # A folder in place of an object also uses up its number.
        return [*super().names(), *self.storage.folders()]

    def holder(self, generation: int) -> Holder | None:
        """Return the holder of a generation; None if its object was removed or is damaged.

        A live holder rewrites a damaged object within a fraction of the lease time. A dead one is
        treated as a silent one, and another process takes over.
        """
        try:
            return Holder.model_validate_json(self.storage.read(self.name(generation)))
        except (FileNotFoundError, Unreadable, ValidationError):
            return None

    def fence(self, generation: int, what: Held = "run") -> None:
        """Check the lease right before an operation that only the holder may do.

        Raises:
            RunBusy: another supervisor took over the run.
        """
        last = self.last()
        if last > generation:
            holder = self.holder(last)
            raise RunBusy(
                f"this {what} was taken over by {_who(holder)}: its {_HOLDERS[what][1]} of "
                f"generation {generation} was silent for longer than recovery.lease_seconds",
                remedy=f"nothing is lost: the {what} continues there",
            )


class Renewal:
    """The lease as an agent sees it. The agent must know whether its supervisor is still alive."""

    def __init__(self, storage: Storage, generation: int, seconds: float) -> None:
        self.row, self.generation, self.seconds = Generations(storage), generation, seconds
        self.pulse, self._due = Pulse(), 0.0

    def lapsed(self) -> bool:
        """Return whether the lease is no longer renewed, or another supervisor took over the run.

        Call it as often as you like: it only reads storage as often as the lease requires.
        """
        now = time.monotonic()
        if now < self._due:
            return False
        self._due = now + self.seconds / _LOOKS
        seen = self.pulse.seen
        # An unreadable lease counts as unchanged.
        with contextlib.suppress(StorageError, OSError):
            if self.row.last() > self.generation:
                return True
            seen = self.row.holder(self.generation)
        return self.pulse.silence(seen) > self.seconds / 2


class Lease:
    """A run held by this process. A thread renews the lease until it is released."""

    def __init__(
        self, row: Generations, generation: int, holder: Holder, seconds: float, what: Held
    ) -> None:
        self.row, self.generation, self.seconds = row, generation, seconds
        self.holder, self.what = holder, what
        self._renewed = Renewed(self._renew, every=seconds / RENEWALS, name="lease")

    @property
    def lost(self) -> bool:
        """Whether another supervisor took over the run, as of the last renewal."""
        return self._renewed.lost

    def fence(self) -> None:
        """Raise RunBusy if another supervisor took over the run."""
        self.row.fence(self.generation, self.what)

    def release(self) -> None:
        """Release the run. The next supervisor can claim it immediately."""
        self._renewed.end()
        # If this cannot be written, the lease expires by itself.
        with contextlib.suppress(StorageError):
            self._write(released=True)

    def _renew(self) -> bool:
        if self.row.last() > self.generation:
            return False
        self._write(renewed=self.holder.renewed + 1)
        return True

    def _write(self, **changes: float) -> None:
        until = time.time() + self.seconds
        self.holder = self.holder.model_copy(update={"until": until, **changes})
        self.row.storage.write(
            self.row.name(self.generation), self.holder.model_dump_json().encode()
        )


@contextlib.contextmanager
def hold(
    storage: Storage,
    *,
    run_id: str,
    seconds: float,
    after: int = 0,
    what: Held = "run",
    tell: Callable[[str], object] = _log.warning,
) -> Iterator[Lease]:
    """Hold a run for this process.

    Take over from a dead holder immediately, and from a silent one after `seconds`.

    Args:
        run_id: its name, or that of a study.
        after: a generation that the new one must exceed, in case the lease's own objects are lost.
        tell: receives a line if it must wait to see whether the holder is silent.

    Raises:
        RunBusy: a live supervisor holds the run; the message says which one, where, and since when.
        BadInput: the storage has no conditional writes.
        StorageError: storage failed.
    """
    _probe(storage)
    lease = _take(Generations(storage), run_id, seconds, after, what, tell)
    try:
        yield lease
    finally:
        lease.release()


def held(storage: Storage) -> bool:
    """Return whether a supervisor seems to hold a run, without waiting to make sure."""
    row = Generations(storage)
    holder = row.holder(row.last())
    if holder is None:
        return False
    working = holder.working()
    return time.time() < holder.until if working is None else working


def _take(
    row: Generations,
    run_id: str,
    seconds: float,
    after: int,
    what: Held,
    tell: Callable[[str], object],
) -> Lease:
    pulse, met = Pulse(), None
    mine = Holder.here().model_copy(update={"until": time.time() + seconds})
    while True:
        last = row.last()
        holder = row.holder(last)
        first, met = met is None, met or (last, holder)
        working = holder.working() if holder else None
        if last == 0 or working is False or pulse.silence((last, holder)) >= seconds:
            generation = max(last, after) + 1
            if row.claim(generation, mine.model_dump_json().encode()):
                return Lease(row, generation, mine, seconds, what)
        elif working or (last, holder) != met:
            raise RunBusy(
                f"{what} {run_id!r} is being {_HOLDERS[what][0]} by {_who(holder)}",
                remedy=f"wait for it, stop it, or give this {what} another name (run: ...)",
            )
        else:
            if first:
                tell(
                    f"waiting up to {duration(seconds)}, because {_who(holder)} may still use "
                    f"{what} {run_id!r} ({row.storage.uri}/{row.name(last)})"
                )
            time.sleep(_POLL_SECONDS)


def _probe(storage: Storage) -> None:
    """Check that storage supports create-only writes, which keep two supervisors apart."""
    name = f"probe-{uuid.uuid4().hex}"
    storage.write(name, b"")  # a failure here has nothing to do with conditional writes
    try:
        overwritten = storage.write(name, b"", if_absent=True)
    except StorageError as error:
        raise _unfit(storage, error.message) from error
    finally:
        storage.delete(name)
    if overwritten:
        raise _unfit(storage, "it overwrites objects that it was asked only to create")


def _unfit(storage: Storage, why: str) -> BadInput:
    return BadInput(
        f"{storage.uri} has no conditional writes, which keep two supervisors apart: {why}",
        remedy="use a file system with hard links, or an S3 server that supports If-None-Match",
    )


def _who(holder: Holder | None) -> str:
    return str(holder or "another process")

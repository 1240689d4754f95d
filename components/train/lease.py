"""Which supervisor owns a run: a lease in storage, by conditional writes.

A row of numbered objects, each created only where absent, so that of all who ask
for the next number one gets it. The highest number holds the run; it is the
generation that fences the ledger and the checkpoints against those before it. A look
at the lease before each write spares trouble; what is written too late all the same
is known by its generation, and left out by whoever reads (recovery/ledger.py,
checkpoint/lineage.py). The holder renews its object. Whoever sees it unchanged for
the whole time of a lease, by a clock of its own, may take the next number. An agent
gives up after half of that time and takes its ranks down within the other half: two
never train at once.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
from pydantic import ValidationError

from steadytrain.components.shared.errors import BadInput, RunBusy, StorageError, Unreadable
from steadytrain.components.shared.identity import Identity
from steadytrain.components.shared.storage import Storage
from steadytrain.components.train.heartbeat import Pulse

_RENEWALS = 8
"""Renewals in the time of a lease."""
_LOOKS = 20
"""Looks of an agent in the time of a lease."""
_POLL_SECONDS = 0.1


class Holder(Identity):
    """Who holds a run, or held it.

    renewed: how often.
    until: when it ends unless it is renewed, by the holder's clock: for people alone.
    """

    renewed: int = 0
    until: float = 0.0
    released: bool = False

    def working(self) -> bool | None:
        """Whether it is at work on the run; None where that cannot be known from here."""
        if self.released:
            return False
        working, process = self.alive(), self.process()
        with contextlib.suppress(psutil.NoSuchProcess):
            stopped = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
            if process is not None and process.status() in stopped:
                return None
        return working


@dataclass(frozen=True)
class Row:
    """The numbered objects of a run's lease."""

    storage: Storage

    def last(self) -> int:
        """The highest generation so far; 0 where there was none."""
        # A folder in an object's place has taken its number.
        names = [*self.storage.list("generation-"), *self.storage.folders()]
        return max(map(_number, names), default=0)

    def holder(self, generation: int) -> Holder | None:
        """Who took a generation; None where its object is cleared away, or damaged.

        A holder that lives writes it anew within a part of the lease; one that does not is
        succeeded as one that is silent.
        """
        try:
            return Holder.model_validate_json(self.storage.read(_name(generation)))
        except (FileNotFoundError, Unreadable, ValidationError):
            return None

    def fence(self, generation: int) -> None:
        """To be called right before what only the holder may do.

        Raises:
            RunBusy: another supervisor has taken the run over.
        """
        last = self.last()
        if last > generation:
            holder = self.holder(last)
            raise RunBusy(
                f"this run was taken over by {_who(holder)}: its supervisor of generation "
                f"{generation} was silent for longer than recovery.lease_seconds",
                remedy="nothing is lost: the run goes on there",
            )


class Renewal:
    """The lease as an agent sees it, which has to know whether its supervisor lives."""

    def __init__(self, storage: Storage, generation: int, seconds: float) -> None:
        self.row, self.generation, self.seconds = Row(storage), generation, seconds
        self.pulse, self._due = Pulse(), 0.0

    def lapsed(self) -> bool:
        """Whether nobody renews it any more, or another has taken the run over.

        May be asked often: it looks only so often as the lease needs.
        """
        now = time.monotonic()
        if now < self._due:
            return False
        self._due = now + self.seconds / _LOOKS
        seen = self.pulse.seen
        # What cannot be read is taken as unchanged.
        with contextlib.suppress(StorageError, OSError):
            if self.row.last() > self.generation:
                return True
            seen = self.row.holder(self.generation)
        return self.pulse.silence(seen) > self.seconds / 2


class Lease:
    """A run held by this process; renewed by a thread until it is released."""

    def __init__(self, row: Row, generation: int, holder: Holder, seconds: float) -> None:
        self.row, self.generation, self.seconds = row, generation, seconds
        self.holder = holder
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> bool:
        """Whether another has taken the run over, as far as the last renewal saw."""
        return not self._thread.is_alive()

    def fence(self) -> None:
        """Raises RunBusy where another has taken the run over."""
        self.row.fence(self.generation)

    def release(self) -> None:
        """Lets go of the run; the next may take it at once."""
        self._ended.set()
        self._thread.join()
        # Where that cannot be written the lease runs out by itself.
        with contextlib.suppress(StorageError):
            self._write(released=True)

    def _renew(self) -> None:
        while not self._ended.wait(self.seconds / _RENEWALS):
            # Where storage refuses now it may not the next time; until then the lease runs on.
            with contextlib.suppress(StorageError, OSError):
                if self.row.last() > self.generation:
                    return
                self._write(renewed=self.holder.renewed + 1)

    def _write(self, **changes: float) -> None:
        until = time.time() + self.seconds
        self.holder = self.holder.model_copy(update={"until": until, **changes})
        self.row.storage.write(_name(self.generation), self.holder.model_dump_json().encode())


@contextlib.contextmanager
def hold(storage: Storage, *, run_id: str, seconds: float, after: int = 0) -> Iterator[Lease]:
    """Holds a run for this process.

    A holder that is known to be dead is succeeded at once, one that is silent after `seconds`.

    Args:
        after: a generation that the new one must exceed, should the lease's own objects be lost.

    Raises:
        RunBusy: a live supervisor holds it; the message says which, where, since when.
        BadInput: storage has no conditional writes.
        StorageError: storage refused.
    """
    _probe(storage)
    lease = _take(Row(storage), run_id, seconds, after)
    try:
        yield lease
    finally:
        lease.release()


def held(storage: Storage) -> bool:
    """Whether a supervisor seems to hold a run, as far as can be told without waiting."""
    row = Row(storage)
    holder = row.holder(row.last())
    if holder is None:
        return False
    working = holder.working()
    return time.time() < holder.until if working is None else working


def _take(row: Row, run_id: str, seconds: float, after: int) -> Lease:
    pulse, met = Pulse(), None
    mine = Holder.here().model_copy(update={"until": time.time() + seconds})
    while True:
        last = row.last()
        holder = row.holder(last)
        met = met or (last, holder)
        working = holder.working() if holder else None
        if last == 0 or working is False or pulse.silence((last, holder)) >= seconds:
            generation = max(last, after) + 1
            if _claim(row, generation, mine):
                return Lease(row, generation, mine, seconds)
        elif working or (last, holder) != met:
            raise RunBusy(
                f"run {run_id!r} is trained by {_who(holder)}",
                remedy="wait for it, stop it, or give this run another name (run: ...)",
            )
        else:
            time.sleep(_POLL_SECONDS)


def _claim(row: Row, generation: int, mine: Holder) -> bool:
    name = _name(generation)
    if not row.storage.write(name, mine.model_dump_json().encode(), if_absent=True):
        return False
    # Whoever looked long ago may have asked for a number that was taken and cleared away since.
    if row.last() != generation:
        row.storage.delete(name)
        return False
    for older in row.storage.list("generation-"):
        if 0 < _number(older) < generation:
            row.storage.delete(older)
    return True


def _probe(storage: Storage) -> None:
    """Two supervisors are kept apart by writes that succeed only once; are there such?"""
    name = f"probe-{uuid.uuid4().hex}"
    storage.write(name, b"")  # what fails already here has nothing to do with conditions
    try:
        overwritten = storage.write(name, b"", if_absent=True)
    except StorageError as error:
        raise _unfit(storage, error.message) from error
    finally:
        storage.delete(name)
    if overwritten:
        raise _unfit(storage, "it overwrites what it was asked to write only where absent")


def _unfit(storage: Storage, why: str) -> BadInput:
    return BadInput(
        f"{storage.uri} has no conditional writes, by which two supervisors are kept apart: {why}",
        remedy="use a file system with hard links, or an S3 server that honours If-None-Match",
    )


def _who(holder: Holder | None) -> str:
    return str(holder or "another process")


def _name(generation: int) -> str:
    return f"generation-{generation:08d}"


def _number(name: str) -> int:
    """The generation of an object; 0 for the name of anything else."""
    found = re.fullmatch(r"generation-(\d{8,})", name)
    return int(found[1]) if found else 0

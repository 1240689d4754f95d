"""The lease: which process holds what machines share, decided by conditional writes to storage.

It holds a run for its supervisor, a study for its driver, and a lock on S3. It is a sequence of
numbered objects, each written only if absent. If several processes claim the next number, exactly
one gets it. An earlier holder's object is never taken over, because that would need
compare-and-swap. The highest number is the generation, which fences the ledger and the checkpoints
against earlier supervisors. Checking the lease before each write avoids most conflicts. If a write
still comes too late, readers recognize it and ignore it (recovery/ledger.py and
the checkpoint store in train).

The holder keeps renewing its object. A process that sees it unchanged for the full lease time, by
its own clock, may claim the next number. An agent gives up after half of that time and takes its
ranks down within the other half, so two supervisors never train at once.

`lock` is for short work. In a folder, it is a file lock, which the kernel releases when the holder
has died. The library filelock cannot replace it: it unlocks the file when it releases it, so that a
child process with an inherited descriptor would no longer hold the lock. And a look at who holds a
run needs a shared lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Literal, NamedTuple

import psutil
from pydantic import ValidationError

from steadytrain.components.shared.errors import RunBusy, StorageError, Unreadable
from steadytrain.components.shared.paths import checked
from steadytrain.components.shared.periodic import RENEWALS, Pulse, Renewed
from steadytrain.components.shared.processes import Identity
from steadytrain.components.shared.quantities import duration
from steadytrain.components.shared.retry import retry
from steadytrain.components.shared.storage import LocalStorage, Storage, open_storage

_LOOKS = 20
"""Number of times an agent checks the lease per lease time."""
_POLL_SECONDS = 0.1
_SKEW_SECONDS: Final = 300.0
"""Largest difference between the clocks of this machine and of storage."""
_seen: Final = dict[str, Pulse]()
"""The renewals that `is_held` has seen, by address of the lease."""
_log = logging.getLogger(__name__)
Held = Literal["run", "study", "lock"]
"""What a lease is for."""


class _Words(NamedTuple):
    """How messages name a lease: what the holder does and is, and two remedies."""

    used: str
    holder: str
    if_busy: str
    if_lost: str


_RENAME: Final = "wait for it, stop it, or give this {} another name (run: ...)"
_CONTINUES: Final = "nothing is lost: the {} continues there"
_AGAIN: Final = "start the step again: it does what is missing"
_WORDS: Final = {
    "run": _Words("trained", "supervisor", _RENAME, _CONTINUES),
    "study": _Words("driven", "driver", _RENAME, _CONTINUES),
    "lock": _Words("held", "holder", f"wait for the other run to finish, then {_AGAIN}", _AGAIN),
}
_PREFIX: Final = "generation-"


class Holder(Identity):
    """Who holds or held a run.

    renewed: number of renewals so far.
    until: when the lease expires unless it is renewed, by the holder's clock. Only `is_held` uses
        it, for its guess.
    seconds: how long the lease lasts after a renewal; 0 if an earlier version wrote it.
    released: whether the holder released the run.
    """

    renewed: int = 0
    until: float = 0.0
    seconds: float = 0.0
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


@dataclass(frozen=True)
class Generations:
    """The numbered objects of a lease."""

    storage: Storage

    def name(self, generation: int) -> str:
        """Return the name of the object with a number."""
        return f"{_PREFIX}{generation:08d}"

    def last(self) -> int:
        """Return the highest number so far; 0 if there is none."""
        names = self.storage.list(_PREFIX)
        # A folder in place of a file also uses up its number.
        folders = self.storage.folders() if isinstance(self.storage, LocalStorage) else ()
        return max(map(_number, [*names, *folders]), default=0)

    def claim(self, generation: int, content: bytes) -> bool:
        """Claim a number and delete the earlier ones. Return False if another process has it."""
        name = self.name(generation)
        if not self.storage.write(name, content, if_absent=True):
            return False
        # If the caller looked long ago, the number may have been claimed and deleted since then.
        if self.last() != generation:
            self.storage.delete(name)
            return False
        for older in self.storage.list(_PREFIX):
            if 0 < _number(older) < generation:
                self.storage.delete(older)
        return True

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
            words = _WORDS[what]
            raise RunBusy(
                f"this {what} was taken over by {_who(self.holder(last))}: its {words.holder} of "
                f"generation {generation} was silent for longer than its lease"
                f"{'' if what == 'lock' else ' (recovery.lease_seconds)'}",
                remedy=words.if_lost.format(what),
            )


class Renewal:
    """The lease as an agent sees it. The agent must know whether its supervisor is still alive."""

    def __init__(self, storage: Storage, generation: int, seconds: float) -> None:
        self.generations, self.generation, self.seconds = Generations(storage), generation, seconds
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
            if self.generations.last() > self.generation:
                return True
            seen = self.generations.holder(self.generation)
        return self.pulse.silence(seen) > self.seconds / 2


class Lease:
    """What this process holds. A thread renews the lease until it is released.

    claimed: when the claim began, by our monotonic clock.
    """

    def __init__(
        self,
        generations: Generations,
        generation: int,
        holder: Holder,
        seconds: float,
        what: Held,
        claimed: float,
    ) -> None:
        self.generations, self.generation, self.seconds = generations, generation, seconds
        self.holder, self.what, self._written = holder, what, claimed
        self._renewed = Renewed(self._renew, every=seconds / RENEWALS, name="lease")

    @property
    def lost(self) -> bool:
        """Whether another supervisor took over the run, as of the last renewal."""
        return self._renewed.lost

    def fence(self) -> None:
        """Raise RunBusy if another process has taken over."""
        self.generations.fence(self.generation, self.what)

    def check(self) -> None:
        """Raise an error unless we hold the lease, and keep it long enough for a write."""
        self.fence()
        silent = time.monotonic() - self._written
        if silent > self.seconds / 2:
            raise StorageError(
                f"the {self.what} {self.generations.storage.uri} was not renewed for "
                f"{duration(silent)}, and expires after {duration(self.seconds)}",
                remedy=_AGAIN,
            )

    def release(self) -> None:
        """Release the run. The next supervisor can claim it immediately."""
        self._renewed.end()
        # If this cannot be written, the lease expires by itself.
        with contextlib.suppress(StorageError):
            if self.generations.last() == self.generation:
                self._write(released=True)

    def _renew(self) -> bool:
        if self.generations.last() > self.generation:
            return False
        self._write(renewed=self.holder.renewed + 1)
        return True

    def _write(self, **changes: float) -> None:
        began, until = time.monotonic(), time.time() + self.seconds
        self.holder = self.holder.model_copy(update={"until": until, **changes})
        self.generations.storage.write(
            self.generations.name(self.generation), self.holder.model_dump_json().encode()
        )
        self._written = began


@contextlib.contextmanager
def hold(
    storage: Storage,
    *,
    run_id: str,
    seconds: float,
    after: int = 0,
    what: Held = "run",
    wait_seconds: float | None = None,
    notify: Callable[[str], object] = _log.warning,
) -> Iterator[Lease]:
    """Hold a run, a study or a lock for this process.

    Take over from a dead holder immediately, and from a silent one after `seconds`.

    Args:
        run_id: the name of the run, study or lock.
        after: a generation that the new one must exceed, in case the lease's own objects are lost.
        wait_seconds: how long to wait for another holder. None waits only to see whether it is
            silent.
        notify: receives a line if it must wait.

    Raises:
        RunBusy: a live process holds it; the message says which one, where, and since when.
        BadInput: the storage has no conditional writes.
        StorageError: storage failed.
    """
    storage.require_conditional_writes()
    lease = _take(Generations(storage), run_id, seconds, after, what, wait_seconds, notify)
    try:
        yield lease
    finally:
        lease.release()


def is_held(storage: Storage) -> bool:
    """Return whether a supervisor seems to hold a run, without waiting to make sure.

    A holder that this machine cannot see counts as alive until its lease expires by its own clock,
    which may be hours ahead. So it counts no longer than a lease lasts from when this process first
    saw its last renewal, and from when storage says that this was written.
    """
    generations = Generations(storage)
    last = generations.last()
    holder = generations.holder(last)
    if holder is None:
        return False
    working = holder.working()
    if working is not None:
        return working
    if time.time() >= holder.until:
        return False
    if not holder.seconds:
        return True
    silent = _seen.setdefault(storage.uri, Pulse()).silence((last, holder))
    written = time.time() - storage.weigh().newest
    return silent < holder.seconds and written < holder.seconds + _SKEW_SECONDS


def _take(
    generations: Generations,
    run_id: str,
    seconds: float,
    after: int,
    what: Held,
    wait_seconds: float | None,
    notify: Callable[[str], object],
) -> Lease:
    pulse, met, began = Pulse(), None, time.monotonic()
    mine = Holder.here().model_copy(update={"until": time.time() + seconds, "seconds": seconds})
    while True:
        now, last = time.monotonic(), generations.last()
        holder = generations.holder(last)
        first, met = met is None, met or (last, holder)
        working = holder.working() if holder else None
        if last == 0 or working is False or pulse.silence((last, holder)) >= seconds:
            generation = max(last, after) + 1
            if generations.claim(generation, mine.model_dump_json().encode()):
                return Lease(generations, generation, mine, seconds, what, now)
            continue
        alive = working or (last, holder) != met
        if alive if wait_seconds is None else now - began >= wait_seconds:
            words = _WORDS[what]
            raise RunBusy(
                f"{what} {run_id!r} is being {words.used} by {_who(holder)}",
                remedy=words.if_busy.format(what),
            )
        if first:
            longest = duration(seconds if wait_seconds is None else wait_seconds)
            address = f"{generations.storage.uri}/{generations.name(last)}"
            notify(
                f"waiting up to {longest}, because {_who(holder)} may still use {what} "
                f"{run_id!r} ({address})"
            )
        time.sleep(_POLL_SECONDS)


def _number(name: str) -> int:
    """Return the number of an object; 0 if the name is not one of a lease."""
    match = re.fullmatch(rf"{_PREFIX}(\d{{8,}})", name)
    return int(match[1]) if match else 0


def _who(holder: Holder | None) -> str:
    return str(holder or "another process")


EXPIRY_SECONDS = 120.0
WAIT_SECONDS = 600.0
_LOCK_POLL_SECONDS = 0.2


@contextlib.contextmanager
def lock(
    address: str,
    name: str,
    *,
    wait_seconds: float = WAIT_SECONDS,
    expiry_seconds: float = EXPIRY_SECONDS,
) -> Iterator[Callable[[], None]]:
    """Hold the lock `name` at an address: a folder, or s3://bucket/prefix.

    Args:
        address: where the lock is.
        name: the lock's name.
        wait_seconds: how long to wait for it. On S3, the lock of a holder that died on another
            machine can be taken over only after its expiry time, so wait longer than that.
        expiry_seconds: on S3, how long the lock remains held after its holder died.

    Yields:
        A check that raises an error if we no longer hold the lock, or may lose it within half of
        the expiry time. Call it right before each write that the lock protects.

    Raises:
        UnsafeName: if the name leads out of the folder.
        RunBusy: if another process holds it for longer than `wait_seconds`, or, from the check, has
            taken it over.
        StorageError: if storage rejected a request, or, from the check, the renewals.
    """
    storage = open_storage(address)
    if isinstance(storage, LocalStorage):
        with _file_lock(storage.folder / checked(f"{name}.lock", origin="lock"), wait_seconds):
            yield lambda: None
    else:
        with hold(
            storage.sub(f"{name}.lock"),
            run_id=name,
            seconds=expiry_seconds,
            what="lock",
            wait_seconds=wait_seconds,
        ) as lease:
            yield lease.check


def try_lock(handle: IO[Any] | int, *, shared: bool = False) -> bool:
    """Lock an open file until all processes have closed it. Return False if another one holds it.

    Args:
        shared: only exclude those that ask for the lock for themselves.
    """
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _file_lock(path: Path, wait_seconds: float) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as handle:

        def take() -> None:
            if not try_lock(handle):
                raise RunBusy(
                    f"the lock {path} has been held by another run for {duration(wait_seconds)}",
                    remedy="wait for the other run to finish its promotion, then start the step "
                    "again",
                )

        retry(
            take,
            transient=lambda error: isinstance(error, RunBusy),
            seconds=wait_seconds,
            delays=(_LOCK_POLL_SECONDS, _LOCK_POLL_SECONDS),
        )
        # Keep the file: if it were removed, two processes could hold locks on different files with
        # the same name.
        yield

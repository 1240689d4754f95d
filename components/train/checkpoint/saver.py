"""Save while training continues: the training thread takes a snapshot, a background thread writes.

Only the training thread takes part in collectives. In the background, ranks learn about each other
by reading storage. They share background failures at their next step, so all of them stop together.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as StillRunning
from dataclasses import dataclass, field
from typing import Any

from steadytrain.components.shared.errors import SteadytrainError, StorageError
from steadytrain.components.train.attempt import OTHER_RANKS_SECONDS
from steadytrain.components.train.checkpoint.checkpoint import Checkpoint
from steadytrain.components.train.checkpoint.snapshot import (
    HostMemory,
    Piece,
    Snapshot,
    in_place,
)
from steadytrain.components.train.checkpoint.store import CheckpointStore

_WAIT_SECONDS = 1.0
_log = logging.getLogger(__name__)
Gather = Callable[[list[Any]], list[Any]]


@dataclass(frozen=True)
class State:
    """The content of a checkpoint.

    parts: what this rank keeps of each part, on its device.
    shared: plain JSON data of all ranks.
    own: plain JSON data of this rank.
    """

    parts: Mapping[str, Sequence[Piece]]
    shared: Mapping[str, Any]
    own: Mapping[str, Any]


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint.

    blocking_seconds: how long training waited, for the snapshot and for the writer.
    writing_seconds: time from the snapshot to the commit.
    waited_seconds: how long training waited for the writer, up to the commit.
    """

    checkpoint: Checkpoint
    bytes: int
    blocking_seconds: float
    writing_seconds: float
    waited_seconds: float


@dataclass
class _Save:
    """A save in progress on this rank. `commit` follows `written`, and only rank 0 commits."""

    step: int
    best_step: int
    snapshots: Sequence[Snapshot]
    shared: bytes
    own: Mapping[str, Any]
    name: str
    blocking_seconds: float
    began: float = field(default_factory=time.monotonic)
    waited_since: float | None = None
    written: Future[None] = field(default_factory=Future)
    commit: Future[None] = field(default_factory=Future)
    given_up: threading.Event = field(default_factory=threading.Event)

    @property
    def failed(self) -> bool:
        return any(
            future.done() and future.exception() is not None
            for future in (self.written, self.commit)
        )


class Saver:
    """Saves checkpoints. Each rank has one, and all ranks call it at the same steps.

    Args:
        gather: concatenates the lists of all ranks, on each rank.
        on_saved: called on rank 0, from another thread, after a checkpoint is committed.
        on_wait: called every second while training waits for a write.
        on_warning: called on rank 0, from any thread, with problems that do not stop training.
        snapshot: whether to copy the state to host memory and let training continue. Otherwise
            nothing is copied, and training waits until the tensors are written from where they are.
    """

    def __init__(
        self,
        store: CheckpointStore,
        *,
        rank: int,
        world_size: int,
        gather: Gather,
        on_saved: Callable[[Saved], None],
        on_wait: Callable[[], None] = lambda: None,
        on_warning: Callable[[str], None] = _log.warning,
        snapshot: bool = True,
    ) -> None:
        self.store, self.rank, self.world_size = store, rank, world_size
        self.gather, self.on_saved, self.on_wait = gather, on_saved, on_wait
        self.on_warning, self._warned = on_warning, set[bool]()
        self.snapshot, self.memory = snapshot, HostMemory()
        if rank == 0:
            with self._tidying():
                store.begin()
        self._name: str = gather([uuid.uuid4().hex[:12]])[0]
        self._save: _Save | None = None
        self._last_step: int | None = None

    @property
    def failed(self) -> bool:
        """Whether a background write failed on this rank; `settle` raises the error."""
        return self._save is not None and self._save.failed

    def save(self, step: int, best_step: int, take: Callable[[], State]) -> None:
        """Take a snapshot and start writing it. Do nothing if the step already has a checkpoint.

        Without snapshots, the checkpoint is committed when this returns.

        Args:
            best_step: step of the best model so far, whose checkpoint is kept.
            take: returns the state; only called if it is needed.

        Raises:
            NonFiniteState, StorageError: the previous save failed on any rank; without snapshots,
                also this one.
        """
        if step == self._last_step:
            return
        self.settle()
        self._last_step = step
        if self.gather([self.rank == 0 and self.store.has(step)])[0]:
            return
        began = time.monotonic()
        state = take()
        take_part = self.memory.take if self.snapshot else in_place
        snapshots = [take_part(part, pieces) for part, pieces in state.parts.items()]
        # As text, because training keeps changing the data.
        shared, rank_state = json.dumps(state.shared).encode(), json.loads(json.dumps(state.own))
        self._save = _Save(
            step, best_step, snapshots, shared, rank_state, self._name, time.monotonic() - began
        )
        threading.Thread(
            target=self._work, args=(self._save,), name=f"checkpoint-{step}", daemon=True
        ).start()
        if not self.snapshot:
            self.settle()

    def settle(self) -> None:
        """Wait for the current write. Afterwards it is committed, and all ranks know it.

        Raises:
            NonFiniteState, StorageError: the write failed on any rank. All ranks raise it.
        """
        save = self._save
        if save is None:
            return
        save.waited_since = time.monotonic()
        try:
            # Two rounds, so rank 0 does not wait for a file that another rank failed to write.
            self._agree(save.written)
            self._agree(save.commit)
        finally:
            save.given_up.set()
            self._save = None

    def abandon(self, seconds: float) -> None:
        """Give the current write up to `seconds` to finish, after training has failed."""
        save, end = self._save, time.monotonic() + seconds
        if save is None:
            return
        for future in (save.written, save.commit):
            try:
                future.exception(max(0.0, end - time.monotonic()))
            except StillRunning:
                break
        save.given_up.set()
        self._save = None

    def _agree(self, future: Future[None]) -> None:
        failed = self._ended(future)
        failures = [error for error in self.gather([_portable(failed)]) if error is not None]
        if failures:
            raise failed or failures[0]

    def _ended(self, future: Future[None]) -> BaseException | None:
        """Return the future's exception once it is done.

        After OTHER_RANKS_SECONDS, stop calling `on_wait` but keep waiting, so the wait shows up as
        a hang.
        """
        end = time.monotonic() + OTHER_RANKS_SECONDS
        while True:
            try:
                return future.exception(_WAIT_SECONDS)
            except StillRunning:
                if time.monotonic() < end:
                    self.on_wait()

    def _work(self, save: _Save) -> None:
        try:
            self.store.write_rank(save.step, save.name, self.rank, save.snapshots, save.own)
        except BaseException as error:
            save.written.set_exception(error)
            save.commit.set_exception(error)
            return
        save.written.set_result(None)
        try:
            if self.rank == 0:
                self._commit(save)
        except BaseException as error:
            save.commit.set_exception(error)
        else:
            save.commit.set_result(None)

    def _commit(self, save: _Save) -> None:
        manifest = self.store.commit(
            save.step, save.name, self.world_size, save.shared, given_up=save.given_up
        )
        now = time.monotonic()
        waited = now - save.waited_since if save.waited_since is not None else 0.0
        self.on_saved(
            Saved(
                self.store.path(save.step),
                manifest.bytes,
                blocking_seconds=save.blocking_seconds + waited,
                writing_seconds=now - save.began,
                waited_seconds=waited,
            )
        )
        with self._tidying():
            self.store.retain(manifest, save.best_step)

    @contextlib.contextmanager
    def _tidying(self) -> Iterator[None]:
        """Turn a failed removal into a warning, because it only wastes space.

        The checkpoint itself is committed.
        """
        try:
            yield
        except StorageError as error:
            refused = error.denied or error.lasting
            if refused not in self._warned:
                self._warned.add(refused)
                how = (
                    f"cannot be deleted, and use more and more space: {error.message}; give this "
                    "run permission to delete there, or remove them from time to time (steadytrain "
                    "gc)"
                    if refused
                    else f"were not deleted: {error.message}; the next save tries again"
                )
                self.on_warning(f"old checkpoints in {self.store.storage.uri} {how}")


def _portable(error: BaseException | None) -> BaseException | None:
    """Return an error that can be sent to other ranks: steadytrain's own, or the text of others."""
    if error is None or isinstance(error, SteadytrainError):
        return error
    return SteadytrainError(f"another rank failed to save: {type(error).__name__}: {error}")

"""Saving while training goes on: a snapshot on the training thread, the rest behind its back.

No thread but the training's own takes part in a collective. What the ranks must
know of each other in the background they read from storage; what went wrong
there they tell each other at their next step, so that all of them leave together.
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
from steadytrain.components.train.checkpoint.checkpoint import Checkpoint
from steadytrain.components.train.checkpoint.snapshot import (
    HostMemory,
    Piece,
    Snapshot,
    in_place,
)
from steadytrain.components.train.checkpoint.store import OTHER_RANKS_SECONDS, CheckpointStore

_WAIT_SECONDS = 1.0
_log = logging.getLogger(__name__)
Gather = Callable[[list[Any]], list[Any]]


@dataclass(frozen=True)
class State:
    """What a checkpoint is made of.

    parts: what this rank keeps of each part, on its device.
    shared, own: plain JSON data, of all ranks and of this one.
    """

    parts: Mapping[str, Sequence[Piece]]
    shared: Mapping[str, Any]
    own: Mapping[str, Any]


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was committed.

    blocking_seconds: that training waited, for the snapshot and for the writer.
    writing_seconds: from the snapshot to the commit.
    waited_seconds: that training waited for the writer, up to the commit.
    """

    checkpoint: Checkpoint
    bytes: int
    blocking_seconds: float
    writing_seconds: float
    waited_seconds: float


@dataclass
class _Save:
    """A save under way on this rank; `commit` follows `written` and is rank 0's."""

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
    """Saves checkpoints; there is one on each rank, and all are called at the same steps.

    Args:
        gather: the items of all ranks' lists, in one list, on each rank.
        on_saved: called on rank 0, from another thread, after a checkpoint is committed.
        on_wait: called each second while training waits for a write.
        on_warning: called on rank 0, from any thread, with what stops nothing.
        snapshot: whether training goes on with a copy in host memory; otherwise nothing is
            copied, and it waits until the tensors are written from where they are.
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
        self.on_warning, self._warned = on_warning, False
        self.snapshot, self.memory = snapshot, HostMemory()
        if rank == 0:
            with self._tidying():
                store.begin()
        self._name: str = gather([uuid.uuid4().hex[:12]])[0]
        self._save: _Save | None = None
        self._last_step: int | None = None

    @property
    def failed(self) -> bool:
        """Whether a write in the background has failed on this rank; `settle` raises it."""
        return self._save is not None and self._save.failed

    def save(self, step: int, best_step: int, take: Callable[[], State]) -> None:
        """Takes a snapshot and begins to write it; nothing where the step has its checkpoint.

        Without snapshots it is committed when this returns.

        Args:
            best_step: step of the best model so far; its checkpoint stays.
            take: gives the state, where it is needed.

        Raises:
            NonFiniteState, StorageError: the save before this one failed, on whichever rank;
                without snapshots this one.
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
        # As text, since the training goes on changing the data.
        shared, own = json.dumps(state.shared).encode(), json.loads(json.dumps(state.own))
        self._save = _Save(
            step, best_step, snapshots, shared, own, self._name, time.monotonic() - began
        )
        threading.Thread(
            target=self._work, args=(self._save,), name=f"checkpoint-{step}", daemon=True
        ).start()
        if not self.snapshot:
            self.settle()

    def settle(self) -> None:
        """Waits for the write in flight; afterwards it is committed, as all ranks know.

        Raises:
            NonFiniteState, StorageError: it failed, on whichever rank; all ranks raise.
        """
        save = self._save
        if save is None:
            return
        save.waited_since = time.monotonic()
        try:
            # In two turns: rank 0 must not wait for what another rank failed to write.
            self._agree(save.written)
            self._agree(save.commit)
        finally:
            save.given_up.set()
            self._save = None

    def abandon(self, seconds: float) -> None:
        """Lets the write in flight end, where it does so in that time; the training has failed."""
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
        own = self._ended(future)
        found = [error for error in self.gather([_portable(own)]) if error is not None]
        if found:
            raise own or found[0]

    def _ended(self, future: Future[None]) -> BaseException | None:
        """The future's exception, once it is done; after too long a time in silence."""
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
        """What cannot be removed takes room, and nothing else: the checkpoint is committed."""
        try:
            yield
        except StorageError as error:
            if not self._warned:
                self._warned = True
                self.on_warning(
                    f"old checkpoints in {self.store.storage.uri} stay, and take more and more "
                    f"room: {error.message}; allow this run to delete there, or remove them "
                    "from time to time (steadytrain gc)"
                )


def _portable(error: BaseException | None) -> BaseException | None:
    """What can be handed to other ranks: the product's own errors, and the text of others."""
    if error is None or isinstance(error, SteadytrainError):
        return error
    return SteadytrainError(f"another rank failed to save: {type(error).__name__}: {error}")

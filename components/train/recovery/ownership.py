"""Exclusive ownership of a run: no other process can train it or start it over."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar
from functools import partial

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.events.types import Warned
from steadytrain.components.shared.lease import Lease, hold
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.recovery.ledger import Ledger

_owned_here: ContextVar[Lease | None] = ContextVar("lease", default=None)


@contextlib.contextmanager
def owned(config: RunConfig) -> Iterator[Lease]:
    """Hold a run for this process. Inside a context that already holds it, reuse that lease.

    Raises:
        RunBusy: a live supervisor holds it; the message says which one, where, and since when.
        BadInput, StorageError: see `hold`.
    """
    workspace = Workspace.of(config)
    storage = LocalStorage(workspace.lease)
    outer = _owned_here.get()
    if outer is not None and outer.generations.storage.uri == storage.uri:
        yield outer
        return
    with hold(
        storage,
        run_id=workspace.run_id,
        seconds=config.recovery.lease_seconds,
        after=Ledger(workspace).generation(),
        tell=partial(_tell, workspace),
    ) as lease:
        token = _owned_here.set(lease)
        try:
            yield lease
        finally:
            _owned_here.reset(token)


def _tell(workspace: Workspace, message: str) -> None:
    """Report a wait, in a file that no other supervisor writes."""
    with contextlib.closing(workspace.stream(f"lease-{os.getpid()}")) as stream:
        stream.emit(Warned(stage="train", message=message))

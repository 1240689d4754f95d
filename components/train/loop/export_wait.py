"""During the export, rank 0 shows that it is working, and the other ranks wait for its result.

They don't wait in a collective: a long export would exceed its timeout, and the length of an export
is not known in advance. If rank 0 fails or dies, its agent ends them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from steadytrain.components.shared.periodic import Periodic
from steadytrain.components.shared.storage.local import Awaited
from steadytrain.components.train.heartbeat import EVERY_SECONDS

_LOOK_SECONDS = 0.2
_WORK_SECONDS = 0.001
"""CPU seconds since the last beat from which a thread counts as working."""


@contextlib.contextmanager
def beating(beat: Callable[[], object]) -> Iterator[None]:
    """Beat from a second thread while the calling thread is working, measured by its CPU time.

    If the calling thread hangs, for example in a write that never returns, the beats stop.
    """
    clock = time.pthread_getcpuclockid(threading.get_ident())
    before = time.clock_gettime(clock)

    def follow() -> None:
        nonlocal before
        now = time.clock_gettime(clock)
        if now - before >= _WORK_SECONDS:
            before = now
            beat()

    thread = Periodic("beating", follow, every=EVERY_SECONDS)
    try:
        yield
    finally:
        thread.end()


def wait_for_file(path: Path, beat: Callable[[], object]) -> None:
    """Beat until a file exists."""
    awaited = Awaited(path)
    while True:
        # Storage that cannot be read now is looked at again.
        with contextlib.suppress(OSError):
            if awaited.there():
                return
        beat()
        time.sleep(_LOOK_SECONDS)

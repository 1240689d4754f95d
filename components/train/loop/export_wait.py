"""The time that rank 0 takes to export: it shows that it works, and the others wait for its word.

They wait in no collective, whose time-out a long export would exceed, and which nothing of
an export's length can set. Where rank 0 fails or dies its agent ends them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from steadytrain.components.train.heartbeat import EVERY_SECONDS

_LOOK_SECONDS = 0.2
_WORK_SECONDS = 0.001
"""Processor time since the last beat from which a thread counts as working."""


@contextlib.contextmanager
def beating(beat: Callable[[], object]) -> Iterator[None]:
    """Beats beside the calling thread as long as that one works, by its own processor time.

    One that stands still, as in a write that never returns, falls silent.
    """
    clock, ended = time.pthread_getcpuclockid(threading.get_ident()), threading.Event()

    def follow() -> None:
        before = time.clock_gettime(clock)
        while not ended.wait(EVERY_SECONDS):
            now = time.clock_gettime(clock)
            if now - before >= _WORK_SECONDS:
                before = now
                beat()

    thread = threading.Thread(target=follow, name="beating", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def wait_for_file(path: Path, beat: Callable[[], object]) -> None:
    """Beats until a file is there."""
    while not path.exists():
        beat()
        time.sleep(_LOOK_SECONDS)

"""Work that a thread repeats until its owner ends it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext


class Periodic:
    """Calls a function every few seconds, in a daemon thread that starts at once.

    Args:
        name: of the thread.
        work: called again and again; False ends the thread.
        every: seconds between two calls.
        finish: called by the thread when its owner ends it.
        around: entered by the thread while it lives.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], object],
        *,
        every: float,
        finish: Callable[[], object] = lambda: None,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._work, self._every, self._finish, self._around = work, every, finish, around
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def end(self, seconds: float | None = None) -> bool:
        """End the thread. Return whether it has ended within some seconds; None waits for it."""
        self._ending.set()
        self._thread.join(seconds)
        return not self.alive

    def _run(self) -> None:
        with self._around():
            while not self._ending.wait(self._every):
                if self._work() is False:
                    return
            self._finish()

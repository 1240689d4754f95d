"""Whether the process that started this one still wants it to work.

A pipe: the parent keeps the writing end, the child gets the reading end. Whatever arrives
there means stop, whether the parent wrote it or the kernel reports the end of a parent that
died. Unlike a signal it cannot be missed: it stays, and a child that looks late, while it
is still importing, say, finds it all the same.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from functools import cache

VARIABLE = "STEADYTRAIN_LIFELINE"
"""Tells a child the descriptor of its reading end."""


class Lifeline:
    """The parent's side.

    descriptor: of the reading end, to be passed to the child together with VARIABLE.
    """

    def __init__(self) -> None:
        self.descriptor, self._writing = os.pipe()

    def cut(self) -> None:
        """Tells every child to stop. May be called again, and from a signal handler."""
        os.write(self._writing, b"stop")

    def close(self) -> None:
        os.close(self._writing)
        os.close(self.descriptor)


class Tether:
    """The child's side."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._descriptor = descriptor

    def cut(self) -> bool:
        """Whether the parent wants this process to stop, or is dead."""
        return self._readable(0)

    def watch(self, act: Callable[[], object]) -> None:
        """Calls `act` in a thread once it is cut."""

        def wait() -> None:
            self._readable(None)
            act()

        threading.Thread(target=wait, name="lifeline", daemon=True).start()

    def _readable(self, milliseconds: int | None) -> bool:
        # One for each call: an object that waits in one thread cannot be asked in another.
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(milliseconds))


@cache
def tether() -> Tether | None:
    """This process's own; None if nobody holds it by a lifeline."""
    # Removed, since the descriptor means something else to what this process starts.
    descriptor = os.environ.pop(VARIABLE, "")
    return Tether(int(descriptor)) if descriptor else None

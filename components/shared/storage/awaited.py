"""Wait for a file that another machine writes.

A client of a network file system remembers that a file was missing: on NFS for up to 60 s
(acdirmax), however often `stat` asks. It asks the server again when the folder is opened
(close-to-open consistency), and forgets what has changed. So whoever polls for a file opens its
folder too. Only a mount with `nocto` gives this up.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

CACHED_SECONDS = 60.0
"""How long a client may miss a file even so. NFS calls it acdirmax."""
_ASK_SECONDS = 1.0
"""Time between two questions to the server. Between them, each look costs a look at a cache."""


class Awaited:
    """A file that may appear, looked for as often as the caller likes.

    Its first look asks the server.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._again = 0.0

    def there(self, *, surely: bool = False) -> bool:
        """Return whether the file exists.

        Args:
            surely: ask the server now, because something is concluded from a file that is missing.
        """
        if self.path.is_file():
            return True
        now = time.monotonic()
        if now < self._again and not surely:
            return False
        self._again = now + _ASK_SECONDS
        _ask_server(self.path.parent)
        return self.path.is_file()


def _ask_server(folder: Path) -> None:
    """Open a folder. If it is missing too, ask for it in its own folder first."""
    for place in (folder, folder.parent, folder):
        with contextlib.suppress(FileNotFoundError):
            os.close(os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            if place == folder:
                return

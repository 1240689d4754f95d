"""Open files that may have been replaced by something else: a folder, a pipe, a device."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import time
from pathlib import Path
from typing import BinaryIO

UNREADABLE = frozenset(
    {errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENXIO}
)
"""Errors that occur again however often the file is read."""


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading, and nothing else. Opening a pipe would block.

    Raises:
        OSError: the same as `open`; also IsADirectoryError for a folder, and ENXIO for anything
            else that is not a file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.ENXIO, "Not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def set_aside(path: Path) -> Path:
    """Rename whatever is at a path, to keep it for inspection and to free the path.

    Returns:
        Its new path.
    """
    for number in itertools.count(1):
        other = path.with_name(f"{path.name}.damaged-{number}")
        if not os.path.lexists(other):
            path.rename(other)
            return other
    raise AssertionError


# Wait for a file that another machine writes.
#
# A client of a network file system remembers that a file was missing: on NFS for up to 60 s
# (acdirmax), however often `stat` asks. It asks the server again when the folder is opened (close-
# to-open consistency), and forgets what has changed. So whoever polls for a file opens its folder
# too. Only a mount with `nocto` gives this up.

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

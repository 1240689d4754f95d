"""Opening files that may be something else by now: a folder, a pipe, a device."""

from __future__ import annotations

import errno
import itertools
import os
import stat
from pathlib import Path
from typing import BinaryIO

UNREADABLE = frozenset(
    {errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENXIO}
)
"""Errors that come again however often the same file is read."""


def open_regular(path: Path) -> BinaryIO:
    """Opens a file for reading, and nothing but a file: opening a pipe would block.

    Raises:
        OSError: as `open` does; IsADirectoryError for a folder, ENXIO for all else that is no file.
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
    """Renames what lies at a path, so that it can be looked at and is in nobody's way.

    Returns:
        Where it is now.
    """
    for number in itertools.count(1):
        other = path.with_name(f"{path.name}.damaged-{number}")
        if not os.path.lexists(other):
            path.rename(other)
            return other
    raise AssertionError

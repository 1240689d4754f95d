"""Open files that may have been replaced by something else: a folder, a pipe, a device."""

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

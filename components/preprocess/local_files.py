"""Local files of a data set: decide which of them are data, and open them safely.

A data folder may come from anyone. Only regular files are data. Pipes, which would block the
reader, devices, and files that the kernel generates, such as this process's environment in /proc,
are not. A link counts if its target is in the same source, as in the volumes of Kubernetes. Other
links are left out and counted.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

from steadytrain.components.shared.errors import BadInput, DataError

LINKS: Final = "links that leave the source"
BROKEN: Final = "broken links"
SPECIAL: Final = "pipes, sockets, devices and kernel files"

_LEFT_OUT: Final = {"site-packages", "dist-packages", "__pycache__"}
_KERNEL: Final = tuple(map(Path, ("/proc", "/sys", "/dev")))
_MEMORY: Final = Path("/dev/shm")
_KERNEL_FILE_SYSTEMS: Final = {
    *("bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "devtmpfs", "efivarfs"),
    *("mqueue", "nsfs", "proc", "pstore", "securityfs", "selinuxfs", "sysfs", "tracefs"),
}


class Source:
    """A folder whose files are checked one by one.

    Args:
        root: the folder, or a link to one.
        left_out: counts what is not data, by LINKS, BROKEN and SPECIAL.

    Raises:
        BadInput: the folder belongs to the kernel.
    """

    def __init__(self, root: Path, left_out: Counter[str]) -> None:
        self.root, self.left_out = _real(root), left_out
        require_data(root)

    def walk(self, folder: Path) -> Iterator[tuple[Path, Path]]:
        """Yield the files below a folder of the source, as `look` does."""
        for parent, folders, names in os.walk(folder):
            kept = (name for name in folders if name not in _LEFT_OUT)
            folders[:] = sorted(name for name in kept if self._enters(Path(parent, name)))
            yield from self.look(Path(parent, name) for name in names)

    def look(self, paths: Iterable[Path]) -> Iterator[tuple[Path, Path]]:
        """Yield those paths that are data, each with its real location."""
        for path in paths:
            real = _real(path)
            try:
                result = real.stat()
            except OSError:
                # Without a link, the file was removed in the meantime.
                if path.is_symlink():
                    self.left_out[BROKEN] += 1
                continue
            if stat.S_ISDIR(result.st_mode):
                continue
            if not real.is_relative_to(self.root):
                self.left_out[LINKS] += 1
            elif not stat.S_ISREG(result.st_mode) or _of_kernel(real, result):
                self.left_out[SPECIAL] += 1
            else:
                yield path, real

    def _enters(self, folder: Path) -> bool:
        """Return whether a walk enters a folder. It visits link targets only at their real
        location.
        """
        if folder.is_symlink():
            if not _real(folder).is_relative_to(self.root):
                self.left_out[LINKS] += 1
            return False
        with contextlib.suppress(OSError):
            if _of_kernel(folder, folder.stat()):
                self.left_out[SPECIAL] += 1
                return False
        return True


def require_data(path: Path) -> None:
    """Check a file or folder that an address names.

    Raises:
        BadInput: it is neither a regular file nor a folder of regular files.
    """
    real = _real(path)
    result = real.stat()
    regular = stat.S_ISREG(result.st_mode) or stat.S_ISDIR(result.st_mode)
    if not regular or _of_kernel(real, result):
        raise BadInput(
            f"data.source = {str(path)!r} cannot be read: steadytrain reads no pipes, sockets "
            "or devices, and nothing in /proc, /sys or /dev",
            remedy="give a regular file, or a folder of them",
        )


def open_regular(path: Path) -> BinaryIO:
    """Open a file, unless something else has replaced it since it was found.

    Args:
        path: without links, as `Source.look` returns it.

    Raises:
        DataError: the file cannot be read, or was replaced.
    """
    try:
        # A pipe would block without O_NONBLOCK, which regular files ignore.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}",
            remedy="give read permission, or leave the file out (data.exclude)",
        ) from error
    handle = os.fdopen(descriptor, "rb")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode) or _opened(descriptor) not in (path, None):
        handle.close()
        raise DataError(
            f"{path} was replaced while the data were read",
            remedy="start the run again once nothing changes the data",
        )
    return handle


def _real(path: Path) -> Path:
    """Resolve links. Unlike Path.resolve, this does not fail on circular links."""
    return Path(os.path.realpath(path))


def _opened(descriptor: int) -> Path | None:
    """Return the path of an open file as the kernel reports it. None means that it does not."""
    try:
        return Path(f"/proc/self/fd/{descriptor}").readlink()
    except OSError:
        return None


def _of_kernel(real: Path, found: os.stat_result) -> bool:
    """Return whether the kernel generates the file, wherever its file system is mounted."""
    named = any(real.is_relative_to(folder) for folder in _KERNEL)
    return (named and not real.is_relative_to(_MEMORY)) or found.st_dev in _kernel_devices()


@functools.cache
def _kernel_devices() -> frozenset[int]:
    """Return the device numbers of mounted file systems that contain no user files."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
        mounts = (line.partition(" - ") for line in lines.splitlines())
        return frozenset(
            os.makedev(*map(int, mount_point.split()[2].split(":")))
            for mount_point, _, kind in mounts
            if kind.split()[0] in _KERNEL_FILE_SYSTEMS
        )
    return frozenset()

"""A disk as it would be after a crash: record all writes, then reproduce a part of them.

While a `Recorder` is active, each change that this process makes below a folder really happens and
is recorded too. A `Disk` then replays any prefix of the recording: either everything that was done
(a kill), or only what had been synced (a power cut). A file's content and a folder's entries each
need their own fsync.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Change:
    """kind: write, sync_file, sync_folder, link, remove, folder, remove_folder.

    inode: the file or folder that changes.
    name: its relative path.
    """

    kind: str
    inode: int
    name: str = ""
    content: bytes = b""


class Recorder:
    """Records changes below `root`."""

    def __init__(self, root: Path) -> None:
        self.root, self.changes = root, list[Change]()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fdopen", self._fdopen(os.fdopen))
            patch.setattr(os, "fsync", self._fsync(os.fsync))
            patch.setattr(os, "mkdir", self._mkdir(os.mkdir))
            patch.setattr(os, "link", self._link(os.link))
            patch.setattr(os, "replace", self._replace(os.replace))
            patch.setattr(os, "rename", self._replace(os.rename))
            for name in ("unlink", "remove", "rmdir"):
                patch.setattr(os, name, self._remove(getattr(os, name)))
            yield

    def _note(self, kind: str, inode: int, name: str = "", content: bytes = b"") -> None:
        self.changes.append(Change(kind, inode, name, content))

    def _name(self, path: Any, folder: int | None = None) -> str | None:
        """Return the path relative to the root, or None if it is outside."""
        whole = Path(f"/proc/self/fd/{folder}").resolve() / path if folder else Path(path)
        whole = whole.absolute()
        return str(whole.relative_to(self.root)) if whole.is_relative_to(self.root) else None

    def _fdopen(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def fdopen(descriptor: int, *arguments: Any, **options: Any) -> Any:
            handle = real(descriptor, *arguments, **options)
            name = self._name(Path(f"/proc/self/fd/{descriptor}").readlink())
            if name is None:
                return handle
            inode = os.fstat(descriptor).st_ino
            self._note("link", inode, name)
            return _Handle(handle, lambda part: self._note("write", inode, content=bytes(part)))

        return fdopen

    def _fsync(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def fsync(descriptor: int) -> None:
            real(descriptor)
            path = Path(f"/proc/self/fd/{descriptor}").readlink()
            if path == self.root or self._name(path) is not None:
                kind = "sync_folder" if path.is_dir() else "sync_file"
                name = "." if path == self.root else self._name(path)
                self._note(kind, os.fstat(descriptor).st_ino, name or "")

        return fsync

    def _mkdir(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def mkdir(path: Any, *arguments: Any, **options: Any) -> None:
            real(path, *arguments, **options)
            if (name := self._name(path)) is not None:
                self._note("folder", Path(path).stat().st_ino, name)

        return mkdir

    def _link(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def link(source: Any, target: Any, **options: Any) -> None:
            real(source, target, **options)
            if (name := self._name(target)) is not None:
                self._note("link", Path(target).stat().st_ino, name)

        return link

    def _replace(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def replace(source: Any, target: Any, **options: Any) -> None:
            inode = Path(source).stat().st_ino
            real(source, target, **options)
            old, new = self._name(source), self._name(target)
            if old is not None and new is not None:
                self._note("link", inode, new)
                self._note("remove", inode, old)

        return replace

    def _remove(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def remove(path: Any, *, dir_fd: int | None = None) -> None:
            name = self._name(path, dir_fd)
            real(path, dir_fd=dir_fd)
            if name is not None:
                self._note("remove", 0, name)

        return remove


class _Handle:
    """A file that reports what is written to it."""

    def __init__(self, handle: Any, note: Callable[[Any], None]) -> None:
        self.handle, self.note = handle, note

    def write(self, part: Any) -> int:
        self.note(part)
        return int(self.handle.write(part))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.handle, name)

    def __enter__(self) -> _Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.handle.close()


@dataclass
class Disk:
    """Files and folders after some changes: the cached state and the synced state."""

    contents: dict[int, bytes] = field(default_factory=dict)
    synced_contents: dict[int, bytes] = field(default_factory=dict)
    entries: dict[str, tuple[int, bool]] = field(default_factory=dict)
    synced_entries: dict[str, tuple[int, bool]] = field(default_factory=dict)

    @classmethod
    def after(cls, changes: Sequence[Change]) -> Disk:
        disk = cls()
        for change in changes:
            disk.apply(change)
        return disk

    def apply(self, change: Change) -> None:
        if change.kind == "write":
            self.contents[change.inode] = self.contents.get(change.inode, b"") + change.content
        elif change.kind == "sync_file":
            self.synced_contents[change.inode] = self.contents.get(change.inode, b"")
        elif change.kind in ("link", "folder"):
            if change.kind == "link" and not any(
                inode == change.inode for inode, _ in self.entries.values()
            ):
                # A reused inode number means a new file.
                self.contents[change.inode] = b""
                self.synced_contents.pop(change.inode, None)
            self.entries[change.name] = (change.inode, change.kind == "folder")
        elif change.kind == "remove":
            self.entries.pop(change.name, None)
        elif change.kind == "sync_folder":
            self._sync_folder(change.name)

    def _sync_folder(self, folder: str) -> None:
        for entries in (self.synced_entries,):
            for name in [name for name in entries if _parent(name) == folder]:
                del entries[name]
        found = {name: item for name, item in self.entries.items() if _parent(name) == folder}
        self.synced_entries |= found

    def lay_out(
        self,
        target: Path,
        *,
        lost_content: Callable[[int], bool] = lambda _: False,
        lost_entry: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """Write the state to `target`, which is emptied first.

        Args:
            lost_content: returns whether an inode's unsynced content was lost.
            lost_entry: returns whether a name's unsynced entry in its folder was lost.
        """
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        names = self.entries.keys() | self.synced_entries.keys()
        for name in sorted(names):
            entry = (self.synced_entries if lost_entry(name) else self.entries).get(name)
            if entry is None or not (target / name).parent.is_dir():
                continue
            inode, folder = entry
            if folder:
                (target / name).mkdir()
            else:
                contents = self.synced_contents if lost_content(inode) else self.contents
                (target / name).write_bytes(contents.get(inode, b""))


def _parent(name: str) -> str:
    return str(Path(name).parent)

"""A read-only file system of our own that does what NFS does: `python fuse.py FOLDER AT`.

It shows another folder, through the kernel's FUSE. As an NFS client does, it remembers for 60 s
that a name was missing, until the folder is opened. Reading a file named STUCK never returns, and
the process that reads it cannot be killed, as with a server that is gone. It still can before the
server has taken the request. From then on, UNANSWERED is beside the file in the mirrored folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from support.command import wait_for

STUCK = "stuck"
UNANSWERED = "unanswered"
_SILENT = {2, 36, 42}  # FORGET, INTERRUPT, BATCH_FORGET
_NOTIFY_INVALID_ENTRY = 3
_ENOENT, _ENOSYS = 2, 38
_MISSED_SECONDS = 60
_LAZILY = 2  # MNT_DETACH
_DIRECT = struct.pack("<QII", 0, 1, 0)  # open without the page cache


class Mirror:
    """Answers the kernel's requests about a folder, one at a time."""

    def __init__(self, folder: str, channel: int) -> None:
        self.channel = channel
        self.paths = {1: Path(folder)}
        self.missing: dict[int, set[str]] = {}

    def serve(self) -> None:
        while True:
            try:
                request = os.read(self.channel, 1 << 20)
            except OSError:
                return  # unmounted
            _, code, unique, node = struct.unpack_from("<IIQQ", request)
            if code in _SILENT:
                continue
            try:
                answer = self.answer(code, node, request[40:])
            except FileNotFoundError:
                self.send(unique, -_ENOENT)
                continue
            except NotImplementedError:
                self.send(unique, -_ENOSYS)
                continue
            if answer is not None:
                self.send(unique, 0, answer)

    def send(self, unique: int, error: int, body: bytes = b"") -> None:
        with contextlib.suppress(OSError):
            os.write(self.channel, struct.pack("<IiQ", 16 + len(body), error, unique) + body)

    def answer(self, code: int, node: int, body: bytes) -> bytes | None:
        path = self.paths.get(node, Path())
        match code:
            case 26:  # INIT
                ahead = struct.unpack_from("<III", body)[2]
                return struct.pack("<IIIIHHIIHHI28x", 7, 31, ahead, 0, 9, 9, 1 << 16, 1, 16, 0, 0)
            case 1:  # LOOKUP
                return self.entry(node, os.fsdecode(body[:-1]))
            case 3:  # GETATTR
                return struct.pack("<QII", 0, 0, 0) + _attributes(path)
            case 14:  # OPEN
                return _DIRECT
            case 27:  # OPENDIR
                self.forget_missing(node)
                return _DIRECT
            case 15:  # READ
                _, offset, size = struct.unpack_from("<QQI", body)
                if path.name == STUCK:
                    path.with_name(UNANSWERED).touch()
                    return None
                return path.read_bytes()[offset : offset + size]
            case 28:  # READDIR
                _, offset, size = struct.unpack_from("<QQI", body)
                return _names(path, offset, size)
            case 18 | 25 | 29:  # RELEASE, FLUSH, RELEASEDIR
                return b""
        raise NotImplementedError

    def entry(self, folder: int, name: str) -> bytes:
        path = self.paths[folder] / name
        if not path.exists():
            self.missing.setdefault(folder, set()).add(name)
            return struct.pack("<QQQQII", 0, 0, _MISSED_SECONDS, 0, 0, 0) + bytes(88)
        number = path.stat().st_ino
        self.paths[number] = path
        return struct.pack("<QQQQII", number, 0, 0, 0, 0, 0) + _attributes(path)

    def forget_missing(self, folder: int) -> None:
        for name in self.missing.pop(folder, set()):
            raw = os.fsencode(name)
            body = struct.pack("<QII", folder, len(raw), 0) + raw + b"\0"
            self.send(0, _NOTIFY_INVALID_ENTRY, body)


def _attributes(path: Path) -> bytes:
    found = path.stat()
    times = (int(found.st_atime), int(found.st_mtime), int(found.st_ctime))
    sizes = (found.st_ino, found.st_size, found.st_blocks)
    owner = (found.st_mode, found.st_nlink, found.st_uid, found.st_gid)
    return struct.pack("<6Q10I", *sizes, *times, 0, 0, 0, *owner, 0, 4096, 0)


def _names(path: Path, offset: int, size: int) -> bytes:
    found = b""
    for number, item in enumerate(sorted(os.scandir(path), key=lambda item: item.name)):
        name = os.fsencode(item.name)
        kind = stat.S_IFMT(item.stat().st_mode) >> 12
        line = struct.pack("<QQII", item.inode(), number + 1, len(name), kind) + name
        line += bytes(-len(line) % 8)
        if number >= offset and len(found) + len(line) <= size:
            found += line
    return found


def main(folder: str, place: str) -> int:
    channel = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={channel},rootmode=40000,user_id=0,group_id=0,allow_other"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"mirror", os.fsencode(place), b"fuse", 0, options.encode()):
        print(os.strerror(ctypes.get_errno()), flush=True)
        return 1
    print("mounted", flush=True)
    threading.Thread(target=Mirror(folder, channel).serve, daemon=True).start()
    # The tests hold the other end, however they end. No mount remains that nobody answers.
    sys.stdin.read()
    unmount(place)
    return 0


def unmount(place: str | Path) -> None:
    ctypes.CDLL(None).umount2(os.fsencode(place), _LAZILY)


@pytest.fixture
def mirror(tmp_path):
    """Mount a mirror of `tmp_path`/behind; return it and its mount point."""
    behind, place = tmp_path / "behind", tmp_path / "mirror"
    behind.mkdir()
    place.mkdir()
    command = [sys.executable, __file__, str(behind), str(place)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    server = subprocess.Popen(command, **pipes, text=True, env=environment)
    try:
        told = server.stdout.readline().strip()
        if told != "mounted":
            pytest.skip(f"FUSE needs /dev/fuse and the right to mount: {told or 'it failed'}")
        wait_for(lambda: os.path.ismount(place))
        yield behind, place
    finally:
        # The kernel fails what is still waiting once nothing answers, and killed processes end.
        server.kill()
        server.wait()
        unmount(place)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

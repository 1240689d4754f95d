"""Where the runs are: an output folder, or the copy of one on S3. Everything here only reads."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from steadytrain.components.shared.config.run import RUN_NAME
from steadytrain.components.shared.errors import BadInput, StorageError
from steadytrain.components.shared.lease import is_held
from steadytrain.components.shared.paths import checked
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.storage.local import open_regular
from steadytrain.components.shared.workspace import Workspace
from steadytrain.pipelines.options import readable_folder
from steadytrain.pipelines.runs import holder

if TYPE_CHECKING:
    from steadytrain.components.shared.storage import S3Storage

LISTING_SECONDS: Final = 15.0
"""How long a listing of S3 is used. One listing of a thousand runs takes seconds."""
_EVENTS = re.compile(r"events/[^/]+\.jsonl")
_LOGS = re.compile(r"attempts/\d{1,9}/(rank-\d{1,9}\.log|node-\d{1,9}/log)")


class Stamp(NamedTuple):
    """A file's size in bytes, and when it was written (seconds since the epoch)."""

    size: int
    written: float


class Source(Protocol):
    """The runs in one place. Names of files are relative to the run's folder.

    A file or folder that is missing or cannot be read is empty: a page shows what there is.
    """

    @property
    def uri(self) -> str:
        """The folder's absolute path, or the s3:// address."""

    @property
    def refresh_seconds(self) -> float:
        """How often it is worth looking for something new."""

    @property
    def is_local(self) -> bool:
        """Whether reading large files costs neither money nor a network."""

    def runs(self) -> list[str]:
        """Return the names of all runs."""

    def events(self, run: str) -> Mapping[str, Stamp]:
        """Return the files of a run's event stream."""

    def logs(self, run: str) -> Mapping[str, Stamp]:
        """Return the logs of a run's ranks and agents."""

    def read(self, run: str, name: str, start: int = 0, end: int | None = None) -> bytes:
        """Return bytes `start` to `end` of a file, or fewer if it is shorter."""

    def is_held(self, run: str) -> bool:
        """Return whether a process seems to work on a run."""

    def workspace(self, run: str) -> Workspace:
        """Return the run's paths. On S3 they only name it."""


def open_source(address: str) -> Source:
    """Return the source at a folder's path or an s3:// address.

    Raises:
        BadInput: the address is empty or names no bucket, or the folder cannot be read.
    """
    if address.startswith("s3://"):
        from steadytrain.components.shared.storage import S3Storage

        return Prefix(S3Storage(address))
    if not address:
        raise BadInput(
            "--output '' is empty", remedy="give the folder with the runs, or s3://BUCKET/PREFIX"
        )
    output = readable_folder(Path(address)).absolute()
    readable_folder(output / "runs")
    return Folder(output)


class Folder:
    """An output folder."""

    is_local = True
    refresh_seconds = 2.0

    def __init__(self, output: Path) -> None:
        self.output = output

    @property
    def uri(self) -> str:
        return str(self.output)

    def runs(self) -> list[str]:
        try:
            with os.scandir(self.output / "runs") as entries:
                return sorted(item.name for item in entries if _is_run(item.name) and item.is_dir())
        except OSError:
            return []

    def events(self, run: str) -> dict[str, Stamp]:
        return self._stamps(run, "events", ".jsonl")

    def logs(self, run: str) -> dict[str, Stamp]:
        stamps: dict[str, Stamp] = {}
        for attempt in self._folders(run, "attempts"):
            stamps |= self._stamps(run, attempt, ".log")
            for node in self._folders(run, attempt):
                stamps |= self._stamps(run, node, "log")
        return {name: stamp for name, stamp in stamps.items() if _LOGS.fullmatch(name)}

    def read(self, run: str, name: str, start: int = 0, end: int | None = None) -> bytes:
        folder = self.workspace(run).folder
        path = folder / checked(name, origin=self.uri)
        try:
            # A link in a run could show any file of the user who looks at it.
            real = path.resolve(strict=True)
            if not real.is_relative_to(folder.resolve()):
                return b""
            with open_regular(real) as handle:
                handle.seek(start)
                return handle.read() if end is None else handle.read(max(0, end - start))
        except OSError:
            return b""

    def is_held(self, run: str) -> bool:
        workspace = self.workspace(run)
        try:
            return holder(workspace) is not None or is_held(LocalStorage(workspace.lease))
        except StorageError:
            return False

    def workspace(self, run: str) -> Workspace:
        return Workspace(self.output, run)

    def _folders(self, run: str, below: str) -> list[str]:
        try:
            with os.scandir(self.workspace(run).folder / below) as entries:
                return sorted(f"{below}/{item.name}" for item in entries if item.is_dir())
        except OSError:
            return []

    def _stamps(self, run: str, below: str, ending: str) -> dict[str, Stamp]:
        try:
            with os.scandir(self.workspace(run).folder / below) as entries:
                return {
                    f"{below}/{item.name}": Stamp(item.stat().st_size, item.stat().st_mtime)
                    for item in entries
                    if item.name.endswith(ending) and item.is_file()
                }
        except OSError:
            return {}


class Prefix:
    """The copy of an output folder below s3://bucket/prefix."""

    is_local = False
    refresh_seconds = LISTING_SECONDS

    def __init__(self, storage: S3Storage) -> None:
        self.storage = storage
        self._listed: dict[str, dict[str, Stamp]] = {}
        self._until = 0.0

    @property
    def uri(self) -> str:
        return self.storage.uri

    def runs(self) -> list[str]:
        return sorted(self._listing())

    def events(self, run: str) -> dict[str, Stamp]:
        return self._matching(run, _EVENTS)

    def logs(self, run: str) -> dict[str, Stamp]:
        return self._matching(run, _LOGS)

    def read(self, run: str, name: str, start: int = 0, end: int | None = None) -> bytes:
        size = self._listing().get(run, {}).get(name, Stamp(0, 0.0)).size
        end = size if end is None else min(end, size)
        if start >= end:
            return b""
        try:
            return self.storage.read_range(f"runs/{run}/{name}", start, end)
        except (FileNotFoundError, StorageError):
            return b""

    def is_held(self, run: str) -> bool:
        if not any(name.startswith("lease/") for name in self._listing().get(run, {})):
            return False
        try:
            return is_held(self.storage.sub(f"runs/{run}/lease"))
        except StorageError:
            return False

    def workspace(self, run: str) -> Workspace:
        return Workspace(Path(self.uri), run)

    def _matching(self, run: str, pattern: re.Pattern[str]) -> dict[str, Stamp]:
        files = self._listing().get(run, {})
        return {name: stamp for name, stamp in files.items() if pattern.fullmatch(name)}

    def _listing(self) -> dict[str, dict[str, Stamp]]:
        """Return the size of every file of every run, as of the newest listing."""
        if time.monotonic() >= self._until:
            listing: dict[str, dict[str, Stamp]] = {}
            for item in self.storage.describe("runs/"):
                run, _, name = item.name.removeprefix("runs/").partition("/")
                if name and _is_run(run):
                    listing.setdefault(run, {})[name] = Stamp(item.size, item.written)
            self._listed, self._until = listing, time.monotonic() + LISTING_SECONDS
        return self._listed


def _is_run(name: str) -> bool:
    return re.fullmatch(RUN_NAME, name) is not None

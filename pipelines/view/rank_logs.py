"""The logs of a run's ranks and agents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from steadytrain.components.shared.controls import without_controls
from steadytrain.components.shared.errors import BadInput
from steadytrain.pipelines.view.source import Source

SHOWN_BYTES: Final = 128 << 10


@dataclass(frozen=True)
class LogFile:
    """One log: its name in the run's folder, a title for people, and its size in bytes."""

    name: str
    title: str
    size: int


def log_files(source: Source, run: str) -> list[LogFile]:
    """Return the logs of a run, the newest attempt first."""
    found = [LogFile(name, _title(name), stamp.size) for name, stamp in source.logs(run).items()]
    return sorted(found, key=lambda item: (-_attempt(item.name), item.title))


def log_text(source: Source, run: str, name: str) -> tuple[str, bool]:
    """Return the end of a log, and whether it has more before that.

    Raises:
        BadInput: the run has no such log.
    """
    stamp = source.logs(run).get(name)
    if stamp is None:
        raise BadInput(f"run {run!r} has no log {name!r}", remedy="choose one on the run's page")
    start = max(0, stamp.size - SHOWN_BYTES)
    text = source.read(run, name, start, stamp.size).decode("utf-8", "replace")
    if start:
        text = text.partition("\n")[2]
    return without_controls(text), start > 0


def _attempt(name: str) -> int:
    return int(name.split("/")[1])


def _title(name: str) -> str:
    _, attempt, *rest = name.split("/")
    return f"attempt {attempt}, {rest[0].removesuffix('.log').replace('-', ' ')}"

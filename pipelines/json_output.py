"""`--json`: one JSON object on standard output, whether the command works or fails.

Times are in UTC as ISO 8601, durations are seconds, and sizes are bytes. docs/guides/scripts.md
lists the keys of each command, and a test compares that list with what the commands print.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import takewhile
from typing import Annotated, Any

import typer

from steadytrain.components.shared.errors import ConfigError, SteadytrainError

FLAG = "--json"
Json = Annotated[
    bool, typer.Option(FLAG, help="Print one JSON object instead of text, also for an error.")
]


def is_requested(arguments: Sequence[str]) -> bool:
    """Return whether a command line asks for JSON. After `--`, nothing is an option."""
    return FLAG in takewhile(lambda argument: argument != "--", arguments)


_collected: list[str] | None = None
"""What `collected` gathers; None outside of it."""


def show(content: Mapping[str, Any]) -> None:
    """Print an object on standard output, or pass it to `collected`."""
    typer.echo(as_text(content)) if _collected is None else _collected.append(as_text(content))


@contextlib.contextmanager
def collected() -> Iterator[list[str]]:
    """Collect what the block shows. The caller prints one object when the command has ended."""
    global _collected
    _collected = []
    try:
        yield _collected
    finally:
        _collected = None


def as_text(content: Mapping[str, Any]) -> str:
    """Return an object as JSON."""
    return json.dumps(content, indent=2)


def moment(time: float) -> str | None:
    """Return a timestamp (seconds since 1970) for programs; None for 0, which means unknown."""
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="seconds") if time else None


def of_error(error: SteadytrainError) -> dict[str, Any]:
    """Return the object that stands for an error: what is wrong, the fix, and the exit status."""
    told = failure(type(error).__name__, error.message, error.remedy, error.exit_code)
    if isinstance(error, ConfigError):
        names = ("field", "value", "message", "remedy")
        told["error"]["problems"] = [
            {name: getattr(problem, name) for name in names} for problem in error.problems
        ]
    return told


def failure(kind: str, message: str, remedy: str, exit_status: int) -> dict[str, Any]:
    """Return the object that stands for any failure."""
    told = {"type": kind, "message": message, "remedy": remedy, "exit_status": exit_status}
    return {"error": told}

"""Every event of a run, from the event types."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator

from reference.markdown import code, table

from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.events.types import Event


def page() -> str:
    """A section for each event."""
    intro = (
        "# Events\n\n"
        "A run writes events as JSON lines to `<output>/runs/<run>/events/*.jsonl`. Each line "
        "has `event`, `level`, `job_id` and `time`, and the fields below. Times are seconds "
        "since the epoch, durations are seconds, sizes are bytes.\n"
    )
    return "\n".join([intro, *map(_section, kinds())])


def kinds() -> list[type[Event]]:
    """Every type of event, in the order of the code."""
    return Event.__subclasses__()


def _section(kind: type[Event]) -> str:
    summary, _ = _documented(kind)
    meanings = _meanings(kind)
    rows = [
        (code(item.name), code(item.type), _default(item), meanings.get(item.name, ""))
        for item in dataclasses.fields(kind)
        if item.name not in ("time", "batch")
    ]
    if any(item.name == "batch" for item in dataclasses.fields(kind)):
        rows += _batch_rows(optional=hasattr(kind, "batch"))
    heading = f"## {kind.name}\n\nLevel: {kind.level}. {summary}\n"
    return "\n".join([heading, table(("Field", "Type", "Default", "Meaning"), rows)])


def _meanings(kind: type) -> dict[str, str]:
    """What the docstrings of a type and of its bases say of fields."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        found |= _documented(base)[1]
    return found


def _batch_rows(*, optional: bool) -> Iterator[tuple[str, str, str, str]]:
    """Yield the fields of the batch settings, which are in the event itself.

    Args:
        optional: whether all of them may be null, as in a decision that sets none.
    """
    _, meanings = _documented(BatchSettings)
    for item in dataclasses.fields(BatchSettings):
        default = code("None") if optional else _default(item)
        yield code(item.name), code(item.type), default, meanings[item.name]


def _documented(kind: type) -> tuple[str, dict[str, str]]:
    """The docstring's text, and what it says of fields (`a, b: meaning`)."""
    paragraphs = inspect.cleandoc(kind.__doc__ or "").split("\n\n")
    summary: list[str] = []
    meanings: dict[str, str] = {}
    for paragraph in paragraphs:
        found = re.findall(r"^([a-z_]+(?:, [a-z_]+)*): (.*(?:\n +.*)*)", paragraph, re.MULTILINE)
        if not found:
            summary.append(paragraph)
        for names, meaning in found:
            meanings |= dict.fromkeys(names.split(", "), meaning)
    return "\n\n".join(summary), meanings


def _default(item: dataclasses.Field[object]) -> str:
    if item.default is not dataclasses.MISSING:
        return code(repr(item.default))
    return "empty" if item.default_factory is not dataclasses.MISSING else "always given"

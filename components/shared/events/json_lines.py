"""Events as lines of JSON."""

from __future__ import annotations

import dataclasses
import functools
import json
from math import isfinite
from typing import Any, Final

from pydantic import TypeAdapter

from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.events.types import DecisionMade, Event
from steadytrain.components.shared.quantities import LATEST

# Create the encoder once and do not copy fields: this code runs between training steps.
_encode = json.JSONEncoder(ensure_ascii=False).encode
COPY: Final = "copy_of"
"""In a ledger, the key in place of `event` in a line that copies an event of another file."""
_LARGEST = 1 << 63
"""Beyond the floats, a whole number cannot be shown. Nothing that is counted comes near this."""
_TYPES: dict[str, type[Event]] = {kind.name: kind for kind in Event.__subclasses__()}
_BATCH = tuple(item.name for item in dataclasses.fields(BatchSettings))


def to_json(event: Event, *, job_id: str) -> str:
    """Return one line of JSON: event, level, job_id, and the event's own fields.

    The fields of `batch` are beside the others, and null if there is none.
    """
    content: dict[str, Any] = {"event": event.name, "level": event.severity, "job_id": job_id}
    content |= vars(event)
    if "batch" in content:
        batch = content.pop("batch")
        content |= vars(batch) if batch else dict.fromkeys(_BATCH)
    # Python writes NaN and Infinity, which a diverged loss needs. All readers use Python too.
    return _encode(content)


_DIVERGING = {"loss", "grad_norm", "best_score", "scale", "signal", "noise"}
"""Fields that may be NaN or infinite, because training diverges. In others, the line is damaged."""
_RENAMED = {"rung": "fallback"}
"""Fields that older versions wrote under another name."""


def from_json(line: str) -> Event:
    """Return the event in a line.

    Raises:
        ValueError: if the line is torn, has no known event, or has a field of the wrong type or
            with an impossible value.
    """
    try:
        content = json.loads(line)
    except RecursionError as error:
        raise ValueError("nested brackets instead of an event") from error
    name = content.pop("event", "") if isinstance(content, dict) else ""
    if not isinstance(name, str) or name not in _TYPES:
        raise ValueError(f"no known event in {line[:80]!r}")
    content.update({new: content[old] for old, new in _RENAMED.items() if old in content})
    validator, known = _validator(name)
    if "batch" in known:
        content["batch"] = _batch(name, content)
    event = validator.validate_python({key: content[key] for key in known if key in content})
    if not 0 <= event.time <= LATEST:
        raise ValueError(f"an event with an impossible time: {event.time}")
    for key, value in vars(event).items():
        too_large = type(value) is int and abs(value) > _LARGEST
        if too_large or (type(value) is float and not isfinite(value) and key not in _DIVERGING):
            raise ValueError(f"an event with an impossible number: {key}")
    return event


def _batch(name: str, content: dict[str, Any]) -> dict[str, Any] | None:
    """Return the fields of the batch settings; None if the event has none."""
    found = {field: content[field] for field in _BATCH if field in content}
    if name == DecisionMade.name:
        # A decision that names no strategy keeps the one in use.
        found.setdefault("strategy", "")
    return found if found.get("micro_batch_size") is not None else None


@functools.cache
def _validator(name: str) -> tuple[TypeAdapter[Event], tuple[str, ...]]:
    """Return the validator for an event's fields, and their names."""
    kind = _TYPES[name]
    return TypeAdapter(kind), tuple(item.name for item in dataclasses.fields(kind))

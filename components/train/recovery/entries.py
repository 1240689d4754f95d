"""Ledger entries as files: written with a digest, and restored when damaged.

The digest matters because a flipped bit that is still valid JSON could change which batches are
skipped, and so the weights. The supervisor also writes each entry to the run's events
(events/*.jsonl). Damaged or missing entries are restored from there. An entry that no event
contains is never guessed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from steadytrain.components.shared.digest import value_digest
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.events import Event
from steadytrain.components.shared.events.types import (
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    DecisionMade,
    SupervisorStarted,
    TrainingStarted,
    from_json,
    to_json,
)

SCHEMA_VERSION: Final = 2
_WITHOUT_DIGEST: Final = 1
KEPT = (
    SupervisorStarted
    | AttemptStarted
    | TrainingStarted
    | AttemptEnded
    | CheckpointSaved
    | DecisionMade
)
"""The events that are state; other events only report."""
_OF_RANKS = CheckpointSaved | TrainingStarted


@dataclass(frozen=True)
class Entry:
    """A numbered entry, or a hole in its place.

    generation: of the supervisor that wrote it.
    problem: why the event is unknown; "" if it is known, or if its loss was accepted.
    """

    number: int
    event: Event | None = None
    generation: int = 0
    problem: str = ""

    @property
    def is_hole(self) -> bool:
        return bool(self.problem)


def encode(event: Event, *, generation: int, run_id: str) -> bytes:
    """Return the content of an entry's file."""
    content = {
        "schema_version": SCHEMA_VERSION,
        "generation": generation,
        **json.loads(to_json(event, job_id=run_id)),
    }
    return json.dumps(content | {"digest": value_digest(content)}).encode()


def decode(number: int, body: bytes) -> Entry:
    """Parse an entry's file.

    Raises:
        BadInput: another version of steadytrain wrote it.
    """
    try:
        content: Any = json.loads(body)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        return Entry(number, problem="is empty" if not body else "is not JSON")
    digest, version = content.pop("digest", None), content.get("schema_version")
    if digest != value_digest(content) and not (digest is None and version == _WITHOUT_DIGEST):
        return Entry(number, problem="has changed since it was written (SHA-256)")
    if version not in (_WITHOUT_DIGEST, SCHEMA_VERSION):
        raise BadInput(
            f"ledger entry {number} has schema version {version}; this steadytrain reads "
            f"{_WITHOUT_DIGEST} and {SCHEMA_VERSION}",
            remedy="install the version that wrote it, or use another run name",
        )
    try:
        generation = int(content.get("generation", 0))
        return Entry(number, from_json(json.dumps(content)), generation)
    except (ValueError, TypeError) as error:
        return Entry(number, problem=f"does not contain a known event: {error}")


def restored(entries: Sequence[Entry], events: Iterable[Event]) -> list[Entry]:
    """Restore entries for the holes, and for a lost end of the ledger, from the run's events.

    Args:
        entries: in numeric order.
        events: the run's events.
    """
    known = {_key(entry.event) for entry in entries if entry.event is not None}
    lost = [event for event in events if isinstance(event, KEPT) and _key(event) not in known]
    # The ranks' last events may not have reached the ledger when the supervisor died.
    ended = {event.attempt for event in _events(entries, lost) if isinstance(event, AttemptEnded)}
    late = [item for item in lost if isinstance(item, _OF_RANKS) and item.attempt not in ended]
    certain = [event for event in lost if event not in late]
    holes = [entry for entry in entries if entry.is_hole]
    begins = entries[-1].number + 1 if entries else 1
    chosen = [*certain, *late[: max(0, len(holes) - len(certain))]]
    chosen.sort(key=lambda event: event.time)
    numbers = [*(hole.number for hole in holes), *range(begins, begins + len(chosen))]
    found = dict(zip(numbers, chosen, strict=False))
    generation, result = 0, []
    by_number = {entry.number: entry for entry in entries}
    for number in sorted(by_number.keys() | found.keys()):
        if number not in found:
            generation = max(generation, by_number[number].generation)
            continue
        event = found[number]
        if isinstance(event, SupervisorStarted):
            generation = event.generation
        result.append(Entry(number, event, generation))
    return result


def merged(entries: Sequence[Entry], put_back: Iterable[Entry]) -> list[Entry]:
    """Return the entries with the restored ones in place."""
    found = {entry.number: entry for entry in [*entries, *put_back]}
    return [found[number] for number in sorted(found)]


def without_holes(entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries as if each loss were accepted."""
    return [replace(entry, problem="") for entry in entries]


def _events(entries: Iterable[Entry], more: Iterable[Event]) -> list[Event]:
    return [*(entry.event for entry in entries if entry.event is not None), *more]


def _key(event: Event) -> str:
    return to_json(event, job_id="")

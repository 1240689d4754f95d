"""Ledger entries as files: written with a digest, and restored when damaged.

The digest matters because a flipped bit that is still valid JSON could change which batches are
skipped, and so the weights. The supervisor also writes each entry to the run's events
(events/*.jsonl). Damaged or missing entries are restored from there. An entry that no event
contains is never guessed.

Clocks are set back and forward, and differ between nodes. So no time says whether an event is in
the ledger, or where: its content does (`identity`), and the number of its entry.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
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
_NUMBERED = SupervisorStarted | AttemptStarted | AttemptEnded | DecisionMade
"""The supervisor's own events, which it writes to the run's events after the ledger."""


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


def identity(event: Event) -> str:
    """Return what an event has in common with its copies: everything but its time and number."""
    return to_json(replace(numbered(event, 0), time=0.0), job_id="")


def numbered(event: Event, number: int) -> Event:
    """Return an event with the number of its entry. The ranks' events have none."""
    return replace(event, entry=number) if isinstance(event, _NUMBERED) else event


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

    Returns:
        The restored entries, and a hole for each one that was lost without a trace in `entries`.
    """
    known = {identity(entry.event) for entry in entries if entry.event is not None}
    kept = once(event for event in events if isinstance(event, KEPT))
    lost = [event for event in kept if identity(event) not in known]
    taken = {entry.number for entry in entries if not entry.is_hole}
    found, rest = dict[int, Event](), list[Event]()
    for event in lost:
        number = event.entry if isinstance(event, _NUMBERED) else 0
        if number and number not in taken | found.keys():
            found[number] = event
        else:
            rest.append(event)
    last = max([0, *found, *(entry.number for entry in entries)])
    holes = [number for number in range(1, last + 1) if number not in taken | found.keys()]
    # The ranks' last events may not have reached the ledger when the supervisor died.
    ended = {event.attempt for event in _events(entries, lost) if isinstance(event, AttemptEnded)}
    late = [item for item in rest if isinstance(item, _OF_RANKS) and item.attempt not in ended]
    certain = [event for event in rest if event not in late]
    chosen = _in_order([*certain, *late[: max(0, len(holes) - len(certain))]])
    numbers = [*holes, *range(last + 1, last + 1 + len(chosen))]
    found |= dict(zip(numbers, chosen, strict=False))
    generation, result = 0, []
    by_number = {entry.number: entry for entry in entries}
    for number in sorted(by_number.keys() | found.keys() | set(holes)):
        if number not in found:
            missing = Entry(number, problem="is missing")
            if number not in by_number:
                result.append(missing)
            generation = max(generation, by_number.get(number, missing).generation)
            continue
        event = found[number]
        if isinstance(event, SupervisorStarted):
            generation = event.generation
        result.append(Entry(number, numbered(event, number), generation))
    return result


def once(events: Iterable[Event]) -> Iterator[Event]:
    """Yield each event once, the first of its copies."""
    seen = set[str]()
    for event in events:
        if (mine := identity(event)) not in seen:
            seen.add(mine)
            yield event


def _in_order(events: Iterable[Event]) -> list[Event]:
    """Sort events without a number by time, but the ranks' events by what they are about.

    The ranks' clocks may differ. Events of older versions have no numbers.
    """
    by_time = sorted(events, key=lambda event: event.time)
    of_ranks = [event for event in by_time if isinstance(event, _OF_RANKS)]
    ordered = iter(sorted(of_ranks, key=lambda event: (event.attempt, event.step)))
    return [next(ordered) if isinstance(event, _OF_RANKS) else event for event in by_time]


def merged(entries: Sequence[Entry], put_back: Iterable[Entry]) -> list[Entry]:
    """Return the entries with the restored ones in place."""
    found = {entry.number: entry for entry in [*entries, *put_back]}
    return [found[number] for number in sorted(found)]


def without_holes(entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries as if each loss were accepted."""
    return [replace(entry, problem="") for entry in entries]


def _events(entries: Iterable[Entry], more: Iterable[Event]) -> list[Event]:
    return [*(entry.event for entry in entries if entry.event is not None), *more]

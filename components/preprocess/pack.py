"""Pack windows of documents into sequences.

This uses best fit (Ding et al., "Fewer Truncations Improve Language Modeling", 2024) with a limited
number of open sequences: a window goes to the sequence with the least free space that still fits
it. The result depends only on the order of the windows, which is the order of content hashes.
"""

from __future__ import annotations

import bisect
import collections
from collections.abc import Iterable, Iterator
from typing import Final, Protocol, TypeVar

OPEN_SEQUENCES: Final = 256
SHORTEST_WINDOW: Final = 2


class Sized(Protocol):
    """Anything with a length in tokens."""

    def __len__(self) -> int:
        """Return the number of tokens."""


W = TypeVar("W", bound=Sized)


def best_fit(windows: Iterable[W], capacity: int) -> Iterator[list[W]]:
    """Yield sequences of windows with at most `capacity` tokens in total.

    Every window is in exactly one sequence. At most OPEN_SEQUENCES sequences are in memory.
    """
    by_room: dict[int, collections.deque[list[W]]] = {}
    rooms: list[int] = []
    count = 0
    for window in windows:
        place = bisect.bisect_left(rooms, len(window))
        room, sequence = capacity, []
        if place < len(rooms):
            room, sequence = rooms[place], _take(by_room, rooms, place)
            count -= 1
        sequence.append(window)
        room -= len(window)
        if room < SHORTEST_WINDOW:
            yield sequence
            continue
        if room not in by_room:
            bisect.insort(rooms, room)
            by_room[room] = collections.deque()
        by_room[room].append(sequence)
        count += 1
        if count > OPEN_SEQUENCES:
            yield _take(by_room, rooms, 0)
            count -= 1
    while rooms:
        yield _take(by_room, rooms, 0)


def _take(by_room: dict[int, collections.deque[list[W]]], rooms: list[int], place: int) -> list[W]:
    """Remove and return the oldest sequence with the free space at a position of `rooms`."""
    room = rooms[place]
    sequence = by_room[room].popleft()
    if not by_room[room]:
        del by_room[room], rooms[place]
    return sequence

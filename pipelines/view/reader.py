"""One run as far as it has been read: its events, sampled if they are many, and what follows."""

from __future__ import annotations

import math
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Final, TypeVar

from steadytrain.components.observe.run_metrics import RunMetrics
from steadytrain.components.report.facts import Facts
from steadytrain.components.shared.config.document import damage, parse
from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.events import Event
from steadytrain.components.shared.events.stream import from_json
from steadytrain.components.shared.quantities import size
from steadytrain.components.shared.records import (
    EvaluationRecord,
    GateRecord,
    Record,
    RegistrationRecord,
    TrainRecord,
)
from steadytrain.pipelines.view.source import Source, Stamp

# The events of one file, read in small parts: everything in a short file, a sample of a long one.
#
# Nothing is stored. A long file's sample is a few hundred blocks, evenly spaced, and its end. From
# then on only what is appended is read. `fill` reads what lies between the blocks, a part at a
# time, and keeps the events of kinds that are rare in the sample. Of the others, such as training
# steps, the sample has enough to draw a curve.

Read = Callable[[int, int], bytes]
"""Returns bytes `start` to `end` of the file, or fewer if it is shorter."""
LONGEST_LINE: Final = 128 << 10
"""Bytes. A block is extended up to this until it has a whole line."""


@dataclass(frozen=True)
class Detail:
    """How much of a file to read.

    whole: bytes up to which a new part of the file is read completely.
    blocks, block: number of blocks of a longer part, and the bytes of each.
    tail: bytes at the end of a longer part that are read completely.
    most: events of a kind to keep in memory; beyond that, every other one is dropped.
    """

    whole: int
    blocks: int
    block: int
    tail: int
    most: int


BRIEF: Final = Detail(whole=32 << 10, blocks=16, block=1 << 10, tail=16 << 10, most=500)
"""For a row of a list."""
FULL: Final = Detail(whole=2 << 20, blocks=400, block=4 << 10, tail=64 << 10, most=10_000)
"""For a page."""


class EventLog:
    """The events of one file.

    is_sample: whether events are missing, such as training steps.
    """

    def __init__(self, read: Read, detail: Detail) -> None:
        self.read, self.detail = read, detail
        self._forget()

    def _forget(self) -> None:
        self.is_sample = False
        self._end = 0
        self._skipped: list[tuple[int, int]] = []
        self._plenty: tuple[bytes, ...] = ()
        self._found: dict[int, Event] = {}

    @property
    def events(self) -> list[Event]:
        """The events so far, in the order of the file."""
        return [self._found[offset] for offset in sorted(self._found)]

    @property
    def unread(self) -> int:
        """The bytes that `fill` has still to read."""
        return sum(end - start for start, end in self._skipped)

    def follow(self, size: int) -> None:
        """Read what was appended.

        Args:
            size: the file's size now. If it is smaller than before, the file is a new one.
        """
        if size < self._end:
            self._forget()
        if size == self._end:
            return
        if size - self._end <= self.detail.whole:
            self._keep(self._end, size)
        else:
            self._sample(self._end, size)
        self._thin()

    def fill(self, budget: int) -> None:
        """Read at most `budget` bytes of what the sample left out. No line is that long."""
        if not self._skipped:
            return
        start, end = self._skipped.pop(0)
        stop = min(end, start + budget)
        read = self._keep(start, stop, but=self._plenty)
        if stop < end and read > start:
            self._skipped.insert(0, (read, end))

    def _sample(self, start: int, size: int) -> None:
        """Read blocks between `start` and the end of the file, and its end."""
        detail, self.is_sample = self.detail, True
        self._skipped.append((start, size))
        last = size - detail.tail
        while self._keep(last, size) == last and start < last and size - last < LONGEST_LINE:
            last = max(start, 2 * last - size)
        pitch = (last - start) // detail.blocks
        for index in range(detail.blocks):
            begin = start + pitch * index
            length = detail.block
            while self._keep(begin, begin + length) == begin and length < LONGEST_LINE:
                length *= 2
        kinds = Counter(event.name for event in self._found.values())
        plenty = (name for name, count in kinds.items() if count >= detail.blocks)
        self._plenty = tuple(f'{{"event": "{name}"'.encode() for name in plenty)

    def _keep(self, start: int, end: int, *, but: tuple[bytes, ...] = ()) -> int:
        """Read the complete lines of a part, and return where the last one ends.

        Args:
            but: beginnings of lines to skip.
        """
        # One byte more shows whether the part begins with a line.
        before = min(1, start)
        text = self.read(start - before, end)
        first = text.find(b"\n") + 1 if before else 0
        last = text.rfind(b"\n") + 1
        if last <= first:
            return start
        offset = start - before + first
        for line in text[first:last].splitlines(keepends=True):
            if not line.startswith(but) and offset not in self._found:
                event = _event(line)
                if event is not None:
                    self._found[offset] = event
            offset += len(line)
        self._end = max(self._end, offset)
        return offset

    def _thin(self) -> None:
        """Drop every other event of a kind that has too many."""
        kinds = defaultdict[str, list[int]](list)
        for offset in sorted(self._found):
            kinds[self._found[offset].name].append(offset)
        for offsets in kinds.values():
            if len(offsets) > self.detail.most:
                self.is_sample = True
                # The newest stays: gauges show it.
                pairs = zip(offsets[:-1:2], offsets[1:-1:2], strict=False)
                for index, pair in enumerate(pairs):
                    del self._found[self._less_telling(pair, index)]

    def _less_telling(self, pair: tuple[int, int], index: int) -> int:
        """Return the event of a pair to drop: of steps, by turns the lower and the higher loss.

        That keeps spikes. A loss that is not finite always stays.
        """
        losses = [getattr(self._found[offset], "loss", 0.0) for offset in pair]
        if not all(map(math.isfinite, losses)):
            return pair[math.isfinite(losses[1])]
        return pair[(losses[0] < losses[1]) == bool(index % 2)]


def merged(logs: list[EventLog]) -> list[Event]:
    """Return the events of several files, ordered by time."""
    return sorted(chain.from_iterable(log.events for log in logs), key=lambda event: event.time)


def _event(line: bytes) -> Event | None:
    try:
        return from_json(line.decode("utf-8", "replace"))
    except ValueError:
        return None


R = TypeVar("R", bound=Record)
LARGEST_CONFIG: Final = 256 << 10
"""Bytes of a configuration that a page shows."""
FILL_BYTES: Final = 64 << 20
"""How much of a long file `fill` reads at a time."""


class RunReader:
    """Follows the events of a run."""

    def __init__(self, source: Source, run: str, detail: Detail) -> None:
        self.source, self.run, self.detail = source, run, detail
        self._logs: dict[str, EventLog] = {}
        self._lock = threading.Lock()

    @property
    def is_sample(self) -> bool:
        """Whether events are missing, such as training steps."""
        return any(log.is_sample for log in self._logs.values())

    @property
    def unread(self) -> int:
        """The bytes that `fill` has still to read."""
        return sum(log.unread for log in self._logs.values())

    def events(self, files: Mapping[str, Stamp]) -> list[Event]:
        """Return the events of the run's files, as far as they are read, ordered by time."""
        with self._lock:
            for name in self._logs.keys() - files.keys():
                del self._logs[name]
            for name, stamp in files.items():
                if name not in self._logs:
                    read = partial(self.source.read, self.run, name)
                    self._logs[name] = EventLog(read, self.detail)
                self._logs[name].follow(stamp.size)
            return merged(list(self._logs.values()))

    def fill(self) -> None:
        """Read a further part of the longest file, if that costs neither money nor a network."""
        if not self.source.is_local:
            return
        with self._lock:
            waiting = [log for log in self._logs.values() if log.unread]
            if waiting:
                max(waiting, key=lambda log: log.unread).fill(FILL_BYTES)


def brief(source: Source, run: str, events: list[Event]) -> Facts:
    """Return what a row of a list needs. Whether the gate promoted decides what is finished."""
    gate = _record(source, run, "gate", GateRecord)
    return Facts(source.workspace(run), events=events, gate=gate)


def full(source: Source, run: str, events: list[Event]) -> Facts:
    """Return what a page needs. The data card is left to the report."""
    facts = brief(source, run, events)
    facts.history = RunMetrics.of(events).history
    body = source.read(run, "config.yaml", 0, LARGEST_CONFIG + 1)
    text = body[:LARGEST_CONFIG].decode("utf-8", "replace")
    facts.config_text = redact(text)
    is_cut = len(body) > LARGEST_CONFIG
    if is_cut:
        facts.unreadable.append(
            f"config.yaml is larger than {size(LARGEST_CONFIG)}; its beginning is shown"
        )
    try:
        content = parse(facts.config_text, "config.yaml") if body and not is_cut else {}
        facts.config = content if isinstance(content, dict) else {}
        # Redacting changes values, so the digests are those of the text before.
        if facts.config and (harm := damage(text, parse(text, "config.yaml"))):
            facts.unreadable.append(f"config.yaml {harm}")
    except BadInput as error:
        facts.unreadable.append(error.message)
    facts.training = _record(source, run, "train", TrainRecord)
    facts.evaluation = _record(source, run, "evaluate", EvaluationRecord)
    facts.registration = _record(source, run, "register", RegistrationRecord)
    facts.promotion = _record(source, run, "promote", RegistrationRecord)
    return facts


def _record(source: Source, run: str, step: str, kind: type[R]) -> R | None:
    """Return a step's record; None if it is missing or damaged."""
    body = source.read(run, f"records/{step}.json")
    try:
        return kind.model_validate_json(body) if body else None
    except ValueError:
        return None

"""A long file is sampled; a short one and every addition are read completely, and once."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from steadytrain.components.shared.events.stream import to_json
from steadytrain.components.shared.events.types import TrainingStep, Validated
from steadytrain.pipelines.view.reader import BRIEF, FULL, Detail, EventLog

SMALL = Detail(whole=4_000, blocks=10, block=1_000, tail=2_000, most=1_000)


def step(number, loss=1.0):
    return TrainingStep(
        time=float(number), attempt=1, step=number, epoch=0.0, loss=loss, learning_rate=0.1,
        grad_norm=1.0, tokens=number, tokens_per_second=1.0, gpu_memory_used=0, memory_used=1,
    )  # fmt: skip


def validated(number):
    return Validated(
        time=float(number), attempt=1, step=number, epoch=0.0, metrics={"loss": 1.0}, best=False
    )


class File:
    """A file in memory that counts the bytes that are read from it."""

    def __init__(self):
        self.content, self.bytes = b"", 0

    def append(self, *events):
        self.content += b"".join(f"{to_json(event, job_id='run')}\n".encode() for event in events)

    def read(self, start, end):
        part = self.content[start:end]
        self.bytes += len(part)
        return part


def follow(file, detail=SMALL):
    log = EventLog(file.read, detail)
    log.follow(len(file.content))
    return log


def steps_of(log):
    return [event.step for event in log.events if isinstance(event, TrainingStep)]


def test_short_file_is_read_completely_and_additions_once():
    file = File()
    file.append(step(1), validated(1), step(2))
    log = follow(file, FULL)
    assert [event.step for event in log.events] == [1, 1, 2]
    before = file.bytes
    file.append(step(3))
    log.follow(len(file.content))
    log.follow(len(file.content))
    assert steps_of(log) == [1, 2, 3]
    assert file.bytes - before < 800
    assert not log.is_sample


def test_line_that_is_still_being_written_is_read_when_it_is_complete():
    file = File()
    file.append(step(1), step(2))
    whole, file.content = file.content, file.content[:-20]
    log = follow(file)
    assert steps_of(log) == [1]
    file.content = whole
    log.follow(len(whole))
    assert steps_of(log) == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize(("detail", "most"), [(BRIEF, 40 << 10), (FULL, 2 << 20)])
def test_bytes_read_of_a_long_file_do_not_grow_with_it(detail, most):
    file = File()
    file.append(*(step(number) for number in range(1, 20_001)))
    log = follow(file, detail)
    first = file.bytes
    assert first <= most
    assert log.is_sample
    assert steps_of(log)[-1] == 20_000
    assert steps_of(log)[0] == 1
    file.append(step(20_001))
    log.follow(len(file.content))
    assert file.bytes - first < 800


def test_sample_is_spread_over_the_whole_file():
    file = File()
    file.append(*(step(number) for number in range(1, 1001)))
    found = steps_of(follow(file))
    assert 9 < len(found) < 100
    assert max(after - before for before, after in pairwise(found)) < 130


@pytest.mark.parametrize("budget", [700, 1_000, 4_321, 10**9])
def test_filling_finds_every_event_but_steps(budget):
    file = File()
    events = [validated(n) if n % 7 == 0 else step(n) for n in range(1, 1001)]
    file.append(*events)
    log = follow(file)
    sampled = steps_of(log)
    while log.unread:
        before = log.unread
        log.fill(budget)
        assert log.unread < before
    scored = [event.step for event in log.events if isinstance(event, Validated)]
    assert scored == [n for n in range(1, 1001) if n % 7 == 0]
    assert steps_of(log) == sampled


def test_lines_longer_than_a_block_do_not_hide_the_others():
    file = File()
    for number in range(1, 501):
        file.append(step(number))
        file.content += b'{"event": "of a newer version", "x": "' + b"x" * 9_000 + b'"}\n'
    found = steps_of(follow(file))
    assert len(found) >= 5
    assert found[-1] >= 499


def test_replaced_file_is_read_again():
    file = File()
    file.append(step(1), step(2))
    log = follow(file)
    file.content = b""
    file.append(step(9))
    log.follow(len(file.content))
    assert steps_of(log) == [9]


def test_growing_log_keeps_spikes_and_the_newest_step_but_not_everything():
    file, log = File(), None
    detail = Detail(whole=10**9, blocks=1, block=1, tail=1, most=100)
    for number in range(1, 2_001):
        odd = {700: 50.0, 900: math.nan}
        file.append(step(number, odd.get(number, 1.0 + number % 2 / 10)))
        if number % 50 == 0:
            log = log or EventLog(file.read, detail)
            log.follow(len(file.content))
    losses = {event.step: event.loss for event in log.events}
    assert len(losses) <= 100
    assert losses[2_000] == 1.0
    assert math.isnan(losses[900])
    assert log.is_sample


def test_noise_between_events_is_skipped():
    file = File()
    file.append(step(1))
    file.content += b'not json\n{"event": "unknown"}\n\xff\xfe\r\n\n'
    file.append(step(2))
    assert steps_of(follow(file)) == [1, 2]

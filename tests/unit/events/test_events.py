"""The event stream: events are written completely and read once, even from a torn file."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import time

import pytest

from steadytrain.components.shared.events import (
    Cursor,
    EventStream,
    JsonLines,
    read_events,
)
from steadytrain.components.shared.events import (
    stream as stream_module,
)
from steadytrain.components.shared.events.stream import from_json, to_json
from steadytrain.components.shared.events.types import (
    DecisionMade,
    Event,
    StepFailed,
    StepStarted,
    TrainingDiverged,
    TrainingStep,
    Warned,
)
from steadytrain.components.shared.quantities import LATEST

from support.disks import small_file_system

STEP = TrainingStep(
    attempt=1,
    step=10,
    epoch=0.5,
    loss=1.5,
    learning_rate=1e-3,
    grad_norm=0.7,
    tokens=100,
    tokens_per_second=50.0,
    gpu_memory_used=0,
    memory_used=1000,
)


def test_events_read_back_equal():
    assert from_json(to_json(STEP, job_id="run")) == STEP


def test_field_under_its_older_name_reads_back():
    made = DecisionMade(
        attempt=1, failure_class="gpu_oom", action="retry_changed", reason="why", fallback="FSDP"
    )
    assert from_json(to_json(made, job_id="run").replace('"fallback"', '"rung"')) == made


def test_line_has_the_fields_that_log_readers_expect():
    line = json.loads(to_json(STEP, job_id="run-1"))
    assert {"job_id", "epoch", "step", "loss", "gpu_memory_used", "level"} <= line.keys()
    assert (line["event"], line["job_id"]) == ("training_step", "run-1")


def test_nan_loss_round_trips():
    event = from_json(to_json(TrainingDiverged(attempt=1, step=2, loss=math.nan), job_id="r"))
    assert math.isnan(event.loss)
    assert event.level == "fatal"


def test_every_kind_of_event_has_its_own_name():
    kinds = Event.__subclasses__()
    assert len({kind.name for kind in kinds}) == len(kinds)


@pytest.mark.parametrize("line", ['{"event": "step_sta', '{"event": "from_the_future"}'])
def test_line_that_is_not_an_event_is_rejected(line):
    with pytest.raises(ValueError, match=r".+"):
        from_json(line)


def test_follower_sees_each_event_once_and_waits_for_whole_lines(tmp_path):
    stream = EventStream(JsonLines(tmp_path / "a.jsonl", job_id="r"))
    cursor = Cursor(tmp_path)
    stream.emit(STEP)
    assert cursor.new() == [STEP]
    assert cursor.new() == []
    text = to_json(StepStarted(stage="train"), job_id="r")
    with (tmp_path / "b.jsonl").open("a") as handle:
        handle.write(text[:20])
        handle.flush()
        assert cursor.new() == []
        handle.write(text[20:] + "\n")
    assert [event.stage for event in cursor.new()] == ["train"]
    stream.close()


def test_events_of_all_writers_are_ordered_by_time(tmp_path):
    late = StepFailed(stage="b", error="E", message="m", time=20.0)
    early = StepStarted(stage="a", time=10.0)
    streams = [EventStream(JsonLines(tmp_path / f"{name}.jsonl", job_id="r")) for name in (1, 2)]
    for stream, event in zip(streams, (late, early), strict=True):
        stream.emit(event)
        stream.close()
    (tmp_path / "3.jsonl").write_text('{"torn": \nnot json\n{"event": "step_started"}\n')
    assert read_events(tmp_path) == [early, late]


@pytest.mark.parametrize("back", [0.0, 5.0, 3600.0, 2e8])
def test_clock_set_back_keeps_the_order(tmp_path, monkeypatch, back):
    clock, told = 1.8e9, []
    monkeypatch.setattr(stream_module.time, "time", lambda: clock)
    monkeypatch.setattr(stream_module.time, "monotonic", lambda: 100.0)
    for number, stage in enumerate(["preprocess", "train", "train"]):
        stream = EventStream(JsonLines(tmp_path / f"{stage}.jsonl", job_id="r"))
        for change in (1.0, -back, 1.0):
            clock += change
            told.append(f"{stage} {number} {change}")
            stream.emit(Warned(stage=stage, message=told[-1], time=clock))
        stream.close()
        clock -= back
    events = read_events(tmp_path)
    assert [event.message for event in events] == told
    assert events[-1].time - events[0].time == pytest.approx(5.0)


def test_clock_set_back_between_an_event_and_its_line_keeps_the_order(tmp_path, monkeypatch):
    wall, ticks = 1.8e9, 100.0
    monkeypatch.setattr(stream_module.time, "time", lambda: wall)
    monkeypatch.setattr(stream_module.time, "monotonic", lambda: ticks)
    stream = EventStream(JsonLines(tmp_path / "a.jsonl", job_id="r"))
    stream.emit(Warned(stage="a", message="first", time=wall))
    for message, back in (("created before the step", 3600.0), ("created before its line", 0.0)):
        wall, ticks = wall + 0.5, ticks + 0.5
        created = wall
        wall, ticks = wall - back + 1e-5, ticks + 1e-5
        stream.emit(Warned(stage="a", message=message, time=created))
    wall -= 3600.0
    wall, ticks = wall + 0.5, ticks + 0.5
    created = wall
    wall, ticks = wall + 1e-5, ticks + 1e-5
    stream.emit(Warned(stage="a", message="created after the step", time=created))
    stream.close()
    found = [event.time - 1.8e9 for event in read_events(tmp_path)]
    assert found == pytest.approx([0.0, 0.5, 1.0, 1.5], abs=1e-3)


def test_event_about_an_earlier_time_keeps_that_time(tmp_path):
    earlier = time.time() - 100
    for _ in range(2):
        stream = EventStream(JsonLines(tmp_path / "a.jsonl", job_id="r"))
        stream.emit(StepStarted(stage="train"))
        stream.emit(StepStarted(stage="train", time=earlier))
        stream.close()
    assert [event.time for event in read_events(tmp_path)][:2] == [earlier, earlier]


def test_far_future_timestamp_does_not_shift_later_events(tmp_path):
    for when in (1e12, 1e9):
        stream = EventStream(JsonLines(tmp_path / "a.jsonl", job_id="r"))
        stream.emit(StepStarted(stage="train", time=when))
        stream.close()
    assert [event.time for event in read_events(tmp_path)] == [1e9, LATEST]


def test_follower_can_skip_the_past(tmp_path):
    stream = EventStream(JsonLines(tmp_path / "a.jsonl", job_id="r"))
    stream.emit(STEP)
    cursor = Cursor(tmp_path)
    cursor.skip_to_end()
    assert cursor.new() == []
    stream.emit(STEP)
    assert cursor.new() == [STEP]
    stream.close()


def test_torn_line_loses_only_itself(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(to_json(STEP, job_id="r")[:30])
    for _ in range(2):
        stream = EventStream(JsonLines(path, job_id="r"))
        stream.emit(STEP)
        stream.close()
    assert read_events(tmp_path) == [STEP, STEP]
    assert path.read_text().count("\n") == 3


def test_line_with_a_number_beyond_all_floats_is_damaged():
    line = to_json(STEP, job_id="r")
    assert from_json(line) == STEP
    step = f'"step": {STEP.step}'
    assert step in line
    with pytest.raises(ValueError, match="an impossible number: step"):
        from_json(line.replace(step, f'"step": {"9" * 400}'))


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_only_what_diverges_may_be_infinite(value):
    line = to_json(STEP, job_id="r")
    speed, loss = f'"tokens_per_second": {STEP.tokens_per_second}', f'"loss": {STEP.loss}'
    assert speed in line
    assert loss in line
    assert str(from_json(line.replace(loss, f'"loss": {value}')).loss) in value.lower()
    with pytest.raises(ValueError, match="an impossible number: tokens_per_second"):
        from_json(line.replace(speed, f'"tokens_per_second": {value}'))


def test_file_may_be_larger_than_two_gigabytes(tmp_path):
    path = tmp_path / "a.jsonl"
    path.touch()
    os.truncate(path, 5 << 30)
    cursor = Cursor(tmp_path)
    cursor.skip_to_end()
    stream = EventStream(JsonLines(path, job_id="r"))
    stream.emit(STEP)
    stream.close()
    assert cursor.new() == [STEP]
    ((_, _, offset),) = Cursor(tmp_path, {"a.jsonl": 5 << 30}).read()
    assert offset == path.stat().st_size > 5 << 30


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a 64 KiB disk."""
    with small_file_system(tmp_path / "disk", "size=64k") as place:
        yield place


def test_full_disk_stops_no_writer_and_loses_no_event(small_disk):
    stream = EventStream(JsonLines(small_disk / "a.jsonl", job_id="r"))
    stream.emit(STEP)
    filler = small_disk / "filler"
    with contextlib.suppress(OSError):
        filler.write_bytes(b"x" * 100_000)
    waiting = [dataclasses.replace(STEP, step=number) for number in range(11, 60)]
    for event in waiting:
        stream.emit(event)
    assert len(read_events(small_disk)) < 20
    filler.unlink()
    last = dataclasses.replace(STEP, step=60)
    stream.emit(last)
    stream.close()
    *steps, warning = sorted(read_events(small_disk), key=lambda event: event.name == "warned")
    assert steps == [STEP, *waiting, last]
    assert warning.message.endswith("No space left on device")


def test_events_waiting_for_disk_space_are_bounded(small_disk, monkeypatch):
    monkeypatch.setattr(stream_module, "MAX_WAITING", 5)
    stream = EventStream(JsonLines(small_disk / "a.jsonl", job_id="r"))
    filler = small_disk / "filler"
    with contextlib.suppress(OSError):
        filler.write_bytes(b"x" * 100_000)
    for number in range(300):
        stream.emit(dataclasses.replace(STEP, step=number))
    written = len(read_events(small_disk))
    filler.unlink()
    stream.emit(dataclasses.replace(STEP, step=300))
    stream.close()
    *steps, warning = sorted(read_events(small_disk), key=lambda event: event.name == "warned")
    assert [event.step for event in steps[written:]] == [296, 297, 298, 299, 300]
    assert f"{301 - written - 5} of them are lost" in warning.message

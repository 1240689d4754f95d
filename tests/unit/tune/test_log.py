"""The log keeps every record that was written, whatever cuts off the last line."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest

from steadytrain.components.shared.append_log import FileLog, ObjectLog
from steadytrain.components.shared.config import load
from steadytrain.components.shared.errors import BadInput, RunBusy, StorageError
from steadytrain.components.shared.storage import LocalStorage, S3Storage
from steadytrain.components.tune.driver import driving
from steadytrain.components.tune.log import MemoryLog
from steadytrain.components.tune.results import summary
from steadytrain.components.tune.study import Study
from steadytrain.components.tune.trials.base import TrialState, Validation

from support.disks import small_file_system
from support.s3 import mocked_s3
from support.synthetic_trials import SPACE

RECORDS = [{"kind": "reported", "number": n, "values": [n / 3, "é"]} for n in range(5)]


@pytest.fixture(params=["file", "folder", "s3"])
def opened(request, tmp_path, monkeypatch):
    """A function that opens the same log again, as another process does."""
    if request.param == "file":
        yield lambda: FileLog(tmp_path / "log.jsonl")
    elif request.param == "folder":
        yield lambda: ObjectLog(LocalStorage(tmp_path))
    else:
        with mocked_s3(monkeypatch, "studies"):
            yield lambda: ObjectLog(S3Storage("s3://studies/mine"))


def test_records_are_read_back_in_order(opened):
    for record in RECORDS:
        log = opened()
        log.read()
        log.append(record)
    assert opened().read() == RECORDS


def test_records_that_are_appended_at_once_are_read_back_in_order(opened):
    log = opened()
    log.read()
    log.append(*RECORDS[:2])
    log.append(*RECORDS[2:])
    assert opened().read() == RECORDS


def test_torn_last_line_costs_that_line_at_every_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    whole = written(tmp_path / "whole").read_bytes()
    lines = whole.splitlines(keepends=True)
    for end in range(len(whole) - sum(map(len, lines[-3:])), len(whole)):
        path = tmp_path / "torn"
        path.write_bytes(whole[:end])
        log = FileLog(path)
        found = log.read()
        # Without its end of line only, a record is complete.
        assert len(found) == (whole[:end] + b"\n").count(b'"}\n')
        for record in RECORDS[len(found) :]:
            log.append(record)
        assert FileLog(path).read() == RECORDS
        assert path.read_bytes().rstrip() == whole.rstrip()


def test_damaged_last_line_costs_that_line(tmp_path):
    path = written(tmp_path / "log")
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)
    log = FileLog(path)
    assert log.read() == RECORDS[:-1]
    log.append(RECORDS[-1])
    assert FileLog(path).read() == RECORDS


@pytest.mark.parametrize("harm", [Path.unlink, lambda path: os.truncate(path, 9)])
def test_file_that_another_program_changed_is_not_continued(tmp_path, harm):
    """Zeros would take the place of the lost lines."""
    log = FileLog(tmp_path / "log")
    log.append(RECORDS[0])
    harm(log.path)
    with pytest.raises(StorageError, match="was deleted while it was in use"):
        log.append(RECORDS[1])


@pytest.mark.parametrize("damage", ["changed", "removed", "repeated"])
def test_any_other_damage_is_an_error_that_names_the_line(tmp_path, damage):
    path = written(tmp_path / "log")
    lines = path.read_bytes().splitlines(keepends=True)
    changes = {
        "changed": [lines[1][:-9] + lines[1][-8:]],
        "removed": [],
        "repeated": lines[1:2] * 2,
    }
    path.write_bytes(b"".join([lines[0], *changes[damage], *lines[2:]]))
    with pytest.raises(BadInput, match=r"line \d of .*log.* is not the record"):
        FileLog(path).read()


def test_missing_object_is_an_error(tmp_path):
    log = ObjectLog(LocalStorage(tmp_path))
    for record in RECORDS:
        log.append(record)
    (tmp_path / "record-00000002.json").unlink()
    with pytest.raises(BadInput, match="record-00000003"):
        ObjectLog(LocalStorage(tmp_path)).read()


def test_damaged_last_object_is_written_again(tmp_path):
    log = ObjectLog(LocalStorage(tmp_path))
    for record in RECORDS:
        log.append(record)
    (tmp_path / "record-00000004.json").write_text("{")
    again = ObjectLog(LocalStorage(tmp_path))
    assert again.read() == RECORDS[:-1]
    again.append(RECORDS[-1])
    assert ObjectLog(LocalStorage(tmp_path)).read() == RECORDS


def test_two_writers_of_one_object_do_not_overwrite_each_other(tmp_path):
    first, second = ObjectLog(LocalStorage(tmp_path)), ObjectLog(LocalStorage(tmp_path))
    first.append(RECORDS[0])
    with pytest.raises(RunBusy, match="record-00000000"):
        second.append(RECORDS[1])


def test_full_disk_leaves_the_log_as_it_was(tmp_path, monkeypatch):
    path = written(tmp_path / "log")
    before, log = path.read_bytes(), FileLog(path)
    log.read()
    write = os.pwrite

    def full(descriptor, content, offset):
        if offset > len(before):
            raise OSError(28, "No space left on device")
        return write(descriptor, content[:10], offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StorageError, match="No space left"):
        log.append({"kind": "any"})
    assert path.read_bytes() == before
    monkeypatch.undo()
    log.append({"kind": "any"})
    assert FileLog(path).read() == [*RECORDS, {"kind": "any"}]


def written(path):
    log = FileLog(path)
    for record in RECORDS:
        log.append(record)
    return path


@pytest.mark.slow
def test_study_on_s3_has_one_driver_and_keeps_its_records(monkeypatch, tmp_path):
    config = load(
        "causal-lm",
        [("tune.space", SPACE), ("tune.log", "s3://studies/all"), ("output", str(tmp_path))],
    )
    with mocked_s3(monkeypatch, "studies"):
        with driving(config) as log:
            study = Study(config, log)
            study.next()
            with pytest.raises(RunBusy), driving(config):
                pass
        with driving(config) as log:
            assert Study(config, log).history.trials == study.history.trials
        names = S3Storage("s3://studies/all").list()
        assert any(name.endswith("record-00000002.json") for name in names)


def test_study_needs_the_room_of_its_winner_before_it_trains_anything(tmp_path):
    with small_file_system(tmp_path / "small", "size=1m") as disk:
        config = load("causal-lm", [("tune.space", SPACE), ("output", str(disk / "out"))])
        with pytest.raises(BadInput, match=r"^output = .* has 1\.05 MB free"), driving(config):
            pass
        assert not (disk / "out").exists()


ODD = [None, "x", -1, 1.5, True, [], [1], {}, {"a": []}, [["x", {}]], [[1, {"loss": "y"}]], [[1]]]


def test_wrong_types_with_right_checksums_are_damage_and_no_defect(tmp_path):
    config = load("causal-lm", {"tune.space": SPACE, "training.max_steps": 90})
    log = MemoryLog()
    study = Study(config, log)
    first = study.next()
    seen = (Validation(first.until, {"loss": 1.0}),)
    study.report(first.number, TrialState("paused", first.until, seen, 3.0))
    second = study.next()
    study.fail(second.number, "user_bug", "why")
    reached = 0
    for index, record in enumerate(log.records):
        for field in record.keys() - {"config"}:
            for value in ODD:
                changed = [*log.records[:index], {**record, field: value}]
                with contextlib.suppress(BadInput):
                    again = Study(config, MemoryLog(changed))
                    assert json.dumps(summary(again))
                    reached += 1
    assert reached < len(ODD) * len(log.records)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("until", "30", "until: Input should be a valid integer"),
        ("params", [1], "params: Input should be a valid dictionary"),
        ("params", {"training.learning_rate": "fast"}, "training.learning_rate = 'fast'"),
        ("kind", "restarted", "restarted"),
    ],
)
def test_message_names_the_field_of_a_wrong_record(field, value, says):
    config = load("causal-lm", {"tune.space": SPACE, "training.max_steps": 90})
    log = MemoryLog()
    Study(config, log).next()
    log.records[-1] = {**log.records[-1], field: value}
    with pytest.raises(BadInput, match="log is damaged") as caught:
        Study(config, log)
    assert says in caught.value.message

"""The ledger alone holds the state."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from steadytrain.components.shared.append_log import FileLog, decode, encode
from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.errors import BadInput, RunBusy, StorageError
from steadytrain.components.shared.events import Cursor, problems, read_events
from steadytrain.components.shared.events.types import (
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    DecisionMade,
    SupervisorStarted,
    Warned,
)
from steadytrain.components.shared.lease import hold
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.recovery.history import History
from steadytrain.components.train.recovery.ledger import Ledger, LedgerDamaged


@pytest.fixture
def workspace(tmp_path):
    return Workspace(tmp_path, "tiny")


@pytest.fixture
def ledger(workspace):
    return Ledger(workspace)


@pytest.fixture
def log(workspace):
    return workspace.events / "ledger-00000000.jsonl"


def started(attempt, *, time=0.0, resumed=None):
    return AttemptStarted(
        time=time,
        attempt=attempt,
        world_size=1,
        batch=BatchSettings(2),
        gradient_accumulation_steps=2,
        resumed_from_step=resumed,
    )


def saved(attempt, step):
    return CheckpointSaved(
        attempt=attempt, step=step, checkpoint=f"step-{step}", bytes=10, seconds=0.1
    )


def ended(attempt, *, time, outcome="failed", step=0):
    return AttemptEnded(time=time, attempt=attempt, outcome=outcome, step=step)


def test_empty_ledger_begins_at_attempt_one(ledger):
    history = ledger.history()
    assert history.next_attempt == 1
    assert history.seconds == 0


def test_cost_of_the_newest_checkpoint_is_known(ledger):
    ledger.record(started(1))
    assert ledger.history().checkpoint_seconds is None
    ledger.record(saved(1, 4))
    ledger.record(started(2, resumed=4))
    assert ledger.history().checkpoint_seconds == (0.1, 0.0)


def test_new_reader_knows_everything(ledger, workspace):
    decision = DecisionMade(attempt=1, failure_class="network", action="stop", reason="so")
    for event in [
        started(1, time=100),
        saved(1, 10),
        saved(1, 20),
        ended(1, time=130),
        decision,
        started(2, time=200, resumed=20),
    ]:
        ledger.record(event)
    history = Ledger(workspace).history()
    first, second = history.attempts
    assert first.last_step == 20
    assert first.ended.time == 130
    assert second.ended is None
    assert second.last_step == 20
    assert history.decisions == [decision]
    assert history.next_attempt == 3
    assert history.seconds == 30


def test_entries_of_a_superseded_supervisor_are_void(workspace):
    """It checked the lease, was suspended for a long time, and writes when it wakes up."""
    leases = LocalStorage(workspace.lease)
    older = Ledger(workspace)
    with hold(leases, run_id="tiny", seconds=60) as older.lease:
        older.record(started(1, time=100))
        newer = Ledger(workspace)
    with hold(leases, run_id="tiny", seconds=60) as newer.lease:
        newer.record(ended(1, time=110))
        with pytest.raises(RunBusy, match="taken over"):
            older.record(ended(1, time=999))
        older.lease.fence = lambda: None
        older.record(ended(1, time=999))
        older.record(started(2, time=999))
        newer.record(started(2, time=120))
    history = Ledger(workspace).history()
    assert [attempt.started.time for attempt in history.attempts] == [100, 120]
    assert history.attempts[0].ended.time == 110


def test_what_only_reports_and_what_ranks_report_is_an_event_once(ledger, workspace, log):
    stream = workspace.lines("supervisor")
    told = [started(1, time=1.0), Warned(time=2.0, stage="train", message="only told")]
    for event in told:
        ledger.emit(event, stream)
    ranks = workspace.lines("rank-0")
    ranks.append(replace(saved(1, 10), time=3.0))
    ledger.record(replace(saved(1, 10), time=3.0))
    left_out = Counter()
    assert read_events(workspace.events, left_out) == [*told, replace(saved(1, 10), time=3.0)]
    assert not left_out
    assert not problems(workspace.events)
    cursor = Cursor(workspace.events)
    cursor.new()
    assert cursor.position[log.name] == log.stat().st_size, "no sink lacks a copy"
    assert Ledger(workspace).history().attempts[0].last_step == 10


def test_history_is_read_once_and_grows(ledger, workspace, monkeypatch):
    written(ledger)
    later = Ledger(workspace)
    history = later.history()
    later.record(skipped(2, 9))
    monkeypatch.setattr(FileLog, "scan", None)
    assert later.history() is history
    assert history.skipped_batches == (7, 9)


@pytest.mark.parametrize("version", [2, 4])
def test_another_schema_version_is_rejected_by_name(ledger, log, version):
    ledger.record(started(1))
    content = decode(log.read_bytes()) | {"schema_version": version}
    log.write_bytes(encode(content, content.pop("n")))
    with pytest.raises(BadInput, match=f"line 1 of {log} has schema version {version}"):
        Ledger(ledger.workspace).history()


def test_run_of_an_earlier_version_is_refused_with_that_version(ledger, workspace):
    old = workspace.folder / "ledger" / "00000001.json"
    old.parent.mkdir(parents=True)
    old.write_text('{"schema_version": 2}')
    with pytest.raises(BadInput, match="ledger of schema version 2 or 1") as raised:
        ledger.history()
    assert "steadytrain 0.1.0" in raised.value.remedy
    with contextlib.closing(workspace.lines("supervisor")) as stream:
        stream.append(started(1, time=1.0))
    assert ledger.readable() == (History.of([started(1, time=1.0)]), [])


def skipped(attempt, batch):
    return DecisionMade(
        attempt=attempt,
        failure_class="divergence",
        action="retry_changed",
        reason="so",
        skipped_batch=batch,
    )


STORY = [
    SupervisorStarted(time=99.0, generation=0, pid=1, host="here", checkpoints=["step-1 x"]),
    started(1, time=100.0),
    replace(saved(1, 10), time=110.0),
    ended(1, time=130.0),
    replace(skipped(1, 7), time=131.0),
    started(2, time=200.0, resumed=10),
]


def truncate(path):
    path.write_bytes(path.read_bytes()[:9])


def binary(path):
    path.write_bytes(b"\xff\x00\n" * 9)


def make_folder(path):
    path.unlink()
    path.mkdir()


def make_pipe(path):
    path.unlink()
    os.mkfifo(path)


def link_nowhere(path):
    path.unlink()
    path.symlink_to("nowhere")


def break_reads(path):
    path.unlink()
    path.symlink_to("/proc/self/mem")


def written(ledger):
    for event in STORY:
        ledger.record(event)
    return ledger.history()


def refused(workspace, attempts=2):
    """Return the file that accepts the loss that a new supervisor finds."""
    with pytest.raises(LedgerDamaged) as raised:
        Ledger(workspace).check(attempts)
    assert "may change the weights" in raised.value.remedy
    return raised.value.message, Path(raised.value.remedy.rpartition("touch ")[2])


def change(log, number, place, new):
    """Replace bytes of a line."""
    lines = log.read_bytes().splitlines(keepends=True)
    changed = bytearray(lines[number - 1])
    changed[place : place + len(new)] = new
    log.write_bytes(b"".join([*lines[: number - 1], changed, *lines[number:]]))


def flip(log, number, place, bit=0):
    line = log.read_bytes().splitlines(keepends=True)[number - 1]
    place %= len(line)
    change(log, number, place, bytes([line[place] ^ 1 << bit]))


@pytest.mark.parametrize("number", range(1, 7))
@pytest.mark.parametrize("place", [0, 20, -20, -15, -12, -2, -1])
@pytest.mark.parametrize("bit", [0, 5])
def test_flipped_bit_is_restored_and_reported(ledger, workspace, log, number, place, bit):
    """In a record, its checksum or an end of line. Otherwise it could skip another batch."""
    before = written(ledger)
    flip(log, number, place, bit)
    later = Ledger(workspace)
    assert later.history() == before
    (told,) = later.restored
    assert f"line {number} of {log} has changed since it was written" in told
    assert later.readable() == (before, [])
    later.record(skipped(2, 9))
    assert Ledger(workspace).history().skipped_batches == (7, 9)


def test_flipped_bits_of_several_lines_are_restored(ledger, workspace, log):
    before = written(ledger)
    # The last one is in an end of line, after which the lines are counted differently.
    for number in (6, 4, 1, 2):
        flip(log, number, -1 if number == 2 else 30)
    later = Ledger(workspace)
    assert later.history() == before
    assert len(later.restored) == 4


@pytest.mark.parametrize("place", [30, -10])
def test_line_that_ranks_reported_is_restored_from_their_events(ledger, workspace, log, place):
    """It still has its checksum, or all but that."""
    with contextlib.closing(workspace.lines("rank-0")) as ranks:
        for step in (5, 10, 15):
            ranks.append(replace(saved(1, step), time=100.0 + step))
    before = written(ledger)
    line = log.read_bytes().splitlines()[2]
    assert b'"step":10' in line
    change(log, 3, place, b"\0\0\0\0\0\0")
    later = Ledger(workspace)
    later.check(2)
    assert later.history() == before
    assert len(later.restored) == 1

    change(log, 3, -60, b"\0" * 58)
    refused(workspace)


@pytest.mark.parametrize("number", range(1, 7))
@pytest.mark.parametrize("place", [20, -14])
def test_changed_line_is_an_error_that_says_what_to_do(ledger, workspace, log, number, place):
    """No other file has what it had, or no event of a rank fits it."""
    written(ledger)
    with contextlib.closing(workspace.lines("rank-0")) as ranks:
        ranks.append(replace(saved(1, 11), time=110.0))
    change(log, number, place, b"\0\0\0")
    message, accept = refused(workspace)
    assert f"line {number} of {log} has changed since it was written" in message
    history, lost = Ledger(workspace).readable()
    assert len(lost) == 1
    assert len(history.decisions) + len(history.attempts) + bool(history.supervisor) <= 4

    accept.touch()
    later = Ledger(workspace)
    later.check(0)
    later.record(skipped(2, 9))
    assert 9 in Ledger(workspace).history().skipped_batches


@pytest.mark.parametrize(
    "harm", [truncate, binary, make_folder, make_pipe, link_nowhere, break_reads, Path.unlink]
)
def test_lost_log_does_not_start_the_run_over(ledger, workspace, log, harm):
    """Otherwise budgets, skipped batches, and lowered learning rates would silently be lost."""
    written(ledger)
    harm(log)
    _, accept = refused(workspace)
    accept.touch()
    later = Ledger(workspace)
    later.check(2)
    assert later.history().attempts == []


def test_lost_log_of_an_earlier_supervisor_is_an_error(ledger, workspace, log):
    written(ledger)
    later = Ledger(workspace)
    with hold(LocalStorage(workspace.lease), run_id="tiny", seconds=60) as later.lease:
        later.record(ended(2, time=230))
    log.unlink()
    message, accept = refused(workspace)
    assert "entries 1 to 6 of" in message
    accept.touch()
    assert Ledger(workspace).history().attempts == []


def test_torn_last_line_costs_that_line_at_every_byte(ledger, workspace, log, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    before, content = written(ledger), log.read_bytes()
    last = len(content.splitlines(keepends=True)[-1])
    for cut in (1, 2, 14, 15, last // 2, last - 1, last):
        log.write_bytes(content[:-cut])
        again = Ledger(workspace)
        if len(again.history().attempts) == 1:
            again.record(STORY[-1])
        again.record(ended(2, time=230))
        found = Ledger(workspace).history()
        assert [item.started for item in found.attempts] == [
            item.started for item in before.attempts
        ]
        assert found.attempts[-1].ended == ended(2, time=230)


def test_other_files_in_the_folder_are_skipped(ledger, workspace):
    before = written(ledger)
    for name in ("ledger-1.jsonl", "ledger-00000001.jsonl~", "ledger-notes.txt", "other"):
        (workspace.events / name).write_bytes(b"\x00")
    assert Ledger(workspace).history() == before


def test_storage_that_rejects_for_a_moment_or_permanently(ledger, workspace, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    before = written(ledger)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", refuse)
        with pytest.raises(StorageError, match="No space left"):
            ledger.record(skipped(2, 9))
    assert Ledger(workspace).history() == before
    ledger.record(skipped(2, 9))
    assert Ledger(workspace).history().skipped_batches == (7, 9)


def taken_over(nodes):
    return SupervisorStarted(
        generation=0, pid=1, host="here", settings={"compute": {"nodes": nodes}}
    )


def shrunk(nodes):
    return DecisionMade(
        attempt=1,
        failure_class="pending_timeout",
        action="retry_changed",
        reason="so",
        nodes=nodes,
    )


def test_shrink_holds_until_the_configuration_changes_nodes(ledger):
    for event in (taken_over(4), started(1), shrunk(3)):
        ledger.record(event)
    assert ledger.history().nodes == 3
    ledger.record(taken_over(4))
    assert ledger.history().nodes == 3
    ledger.record(taken_over(2))
    assert ledger.history().nodes is None
    ledger.record(shrunk(1))
    assert ledger.history().nodes == 1

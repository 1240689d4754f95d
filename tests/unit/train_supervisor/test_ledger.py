"""The ledger alone holds the state."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.digest import value_digest
from steadytrain.components.shared.errors import BadInput, RunBusy, StorageError
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
from steadytrain.components.train.recovery.ledger import Ledger, LedgerDamaged


@pytest.fixture
def storage(tmp_path):
    return LocalStorage(tmp_path / "ledger")


@pytest.fixture
def ledger(storage):
    return Ledger(storage, run_id="tiny")


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


def test_new_reader_knows_everything(ledger, storage):
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
    history = Ledger(storage, run_id="tiny").history()
    first, second = history.attempts
    assert first.last_step == 20
    assert first.ended.time == 130
    assert second.ended is None
    assert second.last_step == 20
    assert history.decisions == [decision]
    assert history.next_attempt == 3
    assert history.seconds == 30


def test_line_that_is_not_a_state_is_skipped(ledger, storage):
    ledger.record(Warned(stage="train", message="only told"))
    assert storage.list() == []


def test_each_event_is_an_object_with_a_sortable_name(ledger, storage):
    for attempt in range(1, 13):
        ledger.record(started(attempt))
    names = storage.list()
    assert names == sorted(names)
    content = [json.loads(storage.read(name)) for name in names]
    assert [item["attempt"] for item in content] == list(range(1, 13))
    assert {item["schema_version"] for item in content} == {2}


def test_two_writers_never_take_the_same_number(storage):
    class Late(LocalStorage):
        """Storage where another writer comes between the listing and the write."""

        def list(self, prefix=""):
            names = super().list(prefix)
            Ledger(storage, run_id="tiny").record(saved(1, 10))
            return names

    Ledger(storage, run_id="tiny").record(started(1))
    Ledger(Late(storage.folder), run_id="tiny").record(saved(1, 20))
    assert [
        item.step for item in Ledger(storage, run_id="tiny").history().attempts[0].checkpoints
    ] == [
        10,
        20,
    ]


def test_entries_of_a_superseded_supervisor_are_void(storage):
    """It checked the lease, was suspended for a long time, and writes when it wakes up."""
    leases = LocalStorage(storage.folder.parent / "lease")
    older, newer = (Ledger(storage, run_id="tiny") for _ in range(2))
    with hold(leases, run_id="tiny", seconds=60) as older.lease:
        older.record(started(1, time=100))
    with hold(leases, run_id="tiny", seconds=60) as newer.lease:
        newer.record(ended(1, time=110))
        with pytest.raises(RunBusy, match="taken over"):
            older.record(ended(1, time=999))
        older.lease.fence = lambda: None
        older.record(ended(1, time=999))
        older.record(started(2, time=999))
        newer.record(started(2, time=120))
    history = Ledger(storage, run_id="tiny").history()
    assert [attempt.started.time for attempt in history.attempts] == [100, 120]
    assert history.attempts[0].ended.time == 110


def test_another_schema_version_is_rejected_by_name(ledger, storage):
    ledger.record(started(1))
    (name,) = storage.list()
    content = json.loads(storage.read(name)) | {"schema_version": 3}
    del content["digest"]
    storage.write(name, json.dumps(content | {"digest": value_digest(content)}).encode())
    with pytest.raises(BadInput, match="schema version 3"):
        ledger.history()


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


def flip(path):
    """Change a number and keep the JSON valid."""
    path.write_text(path.read_text().replace('"skipped_batch": 7', '"skipped_batch": 5'))


def truncate(path):
    path.write_bytes(path.read_bytes()[:-9])


def empty(path):
    path.write_bytes(b"")


def make_folder(path):
    path.unlink()
    path.mkdir()


def make_pipe(path):
    path.unlink()
    os.mkfifo(path)


def link_nowhere(path):
    path.unlink()
    path.symlink_to("nowhere")


HARMS = [truncate, empty, make_folder, make_pipe, link_nowhere, Path.unlink]


def written(ledger):
    for event in STORY:
        ledger.record(event)
    return ledger.history()


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("number", range(1, 7))
def test_entry_that_is_lost_is_restored_from_the_events(ledger, storage, harm, number):
    before = written(ledger)
    harm(storage.folder / f"{number:08d}.json")
    reader = Ledger(storage, run_id="tiny")
    assert reader.history_from(STORY) == (before, [])
    (told,) = reader.repair(STORY)
    assert f"{number:08d}.json ({STORY[number - 1].name})" in told
    assert reader.history() == before
    assert reader.repair(STORY) == []


def test_flipped_bit_in_valid_json_never_changes_skipped_batches(ledger, storage):
    before = written(ledger)
    path = storage.folder / "00000005.json"
    flip(path)
    with pytest.raises(
        BadInput, match=r"00000005.json has changed since it was written \(SHA-256\)"
    ):
        ledger.history()
    ledger.repair(STORY)
    assert ledger.history() == before
    assert before.skipped_batches == (7,)
    assert path.with_name("00000005.json.damaged-1").is_file()


@pytest.mark.parametrize("harm", [*HARMS, flip])
def test_lost_entry_is_an_error_that_says_what_to_do(ledger, storage, harm):
    written(ledger)
    harm(storage.folder / "00000005.json")
    told = [event for event in STORY if not isinstance(event, DecisionMade)]
    with pytest.raises(LedgerDamaged) as raised:
        ledger.repair(told)
    accept = raised.value.remedy.rpartition("touch ")[2]
    assert str(storage.folder / "00000005.json") in raised.value.message
    assert "may change the weights" in raised.value.remedy
    history, problems = ledger.history_from(told)
    assert history.skipped_batches == ()
    assert len(problems) == 1

    Path(accept).touch()
    assert ledger.repair(told) == []
    assert ledger.history().skipped_batches == ()
    ledger.record(skipped(2, 9))
    assert ledger.history().skipped_batches == (9,)


def test_deleted_ledger_is_restored(ledger, storage):
    before = written(ledger)
    shutil.rmtree(storage.folder)
    reader = Ledger(storage, run_id="tiny")
    assert len(reader.repair(STORY, attempts=2)) == len(STORY)
    assert reader.history() == before


def test_unknown_attempts_do_not_start_a_new_run(ledger, storage):
    """Otherwise budgets, skipped batches, and lowered learning rates would silently be lost."""
    with pytest.raises(LedgerDamaged, match="attempt 2 left traces") as raised:
        ledger.repair([], attempts=2)
    accept = Path(raised.value.remedy.rpartition("touch ")[2])
    accept.parent.mkdir()
    accept.touch()
    assert ledger.repair([], attempts=2) == []
    assert ledger.history().attempts == []


def test_other_files_in_the_folder_are_skipped(ledger, storage):
    before = written(ledger)
    for name in ("notes.txt", "00000003.json~", "1.json", "99999999.json", "other"):
        (storage.folder / name).write_bytes(b"\x00")
    assert Ledger(storage, run_id="tiny").history() == before
    Ledger(storage, run_id="tiny").record(ended(2, time=230))
    assert (storage.folder / "00000007.json").is_file()


def test_rejected_write_that_succeeded_counts_once(storage):
    """On a network file system, the answer may be lost."""

    class Lossy(LocalStorage):
        answers = 2

        def write(self, name, content, *, if_absent=False):
            done = super().write(name, content, if_absent=if_absent)
            self.answers -= 1
            if self.answers >= 0:
                raise StorageError("no answer")
            return done

    slow = skipped(1, 7)
    Ledger(Lossy(storage.folder), run_id="tiny").record(slow, seconds=30)
    assert Ledger(storage, run_id="tiny").history().decisions == [slow]


def test_storage_that_rejects_permanently_is_reported(storage, monkeypatch):
    def refuse(self, name, content, *, if_absent=False):
        raise StorageError("no room")

    monkeypatch.setattr(LocalStorage, "write", refuse)
    with pytest.raises(StorageError, match="no room"):
        Ledger(storage, run_id="tiny").record(started(1), seconds=1)


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


def test_events_whose_time_moved_are_known(ledger):
    """The event stream moves times forward after the clock was set back."""
    before = written(ledger)
    assert ledger.repair([replace(event, time=event.time + 3600) for event in STORY]) == []
    assert ledger.history() == before


def test_copies_in_an_older_ledger_count_once(ledger, storage):
    """Older versions appended moved events again, and a learning-rate scale counted twice."""
    slower = replace(skipped(1, 7), learning_rate_scale=0.1)
    for moved in (0, 3600):
        Ledger(storage, run_id="tiny").record(replace(slower, time=slower.time + moved))
    assert ledger.history().decisions == [slower]
    assert ledger.history().learning_rate_scale == 0.1


@pytest.mark.parametrize("lost", [{2, 5}, {3, 4}, {3, 5, 6}, set(range(1, 7))])
def test_entries_return_to_their_places_whatever_the_clocks_say(ledger, storage, lost):
    """One event is from a clock in the far future, and the later ones from one in the past."""
    skewed = [replace(STORY[0], time=9e9), *(replace(e, time=1e9 - e.time) for e in STORY[1:])]
    told = [ledger.record(event) for event in skewed]
    before = ledger.history()
    for number in lost:
        (storage.folder / f"{number:08d}.json").unlink()
    reader = Ledger(storage, run_id="tiny")
    reader.repair(sorted(told, key=lambda event: event.time))
    assert [entry.event for entry in reader.entries()] == skewed
    assert reader.history() == before


def test_entry_that_only_later_numbers_reveal_is_an_error(ledger, storage):
    told = [ledger.record(event) for event in STORY]
    for number in (4, 5, 6):
        (storage.folder / f"{number:08d}.json").unlink()
    with pytest.raises(LedgerDamaged, match=r"00000005.json is missing"):
        Ledger(storage, run_id="tiny").repair([told[3], told[5]])

"""The ledger alone holds the state."""

from __future__ import annotations

import json

import pytest

from steadytrain.components.shared.errors import BadInput, RunBusy
from steadytrain.components.shared.events.types import (
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    DecisionMade,
    Warned,
)
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.train.lease import hold
from steadytrain.components.train.recovery.ledger import Ledger


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
        micro_batch_size=2,
        gradient_accumulation_steps=2,
        resumed_from_step=resumed,
    )


def saved(attempt, step):
    return CheckpointSaved(
        attempt=attempt, step=step, checkpoint=f"step-{step}", bytes=10, seconds=0.1
    )


def ended(attempt, *, time, outcome="failed", step=0):
    return AttemptEnded(time=time, attempt=attempt, outcome=outcome, step=step)


def test_an_empty_ledger_begins_at_attempt_one(ledger):
    history = ledger.history()
    assert history.next_attempt == 1
    assert history.seconds == 0


def test_the_cost_of_the_newest_checkpoint_is_known(ledger):
    ledger.record(started(1))
    assert ledger.history().checkpoint_seconds is None
    ledger.record(saved(1, 4))
    ledger.record(started(2, resumed=4))
    assert ledger.history().checkpoint_seconds == (0.1, 0.0)


def test_a_new_reader_knows_everything(ledger, storage):
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


def test_what_is_no_state_is_passed_over(ledger, storage):
    ledger.record(Warned(stage="train", message="only told"))
    assert storage.list() == []


def test_an_object_an_event_under_names_that_sort(ledger, storage):
    for attempt in range(1, 13):
        ledger.record(started(attempt))
    names = storage.list()
    assert names == sorted(names)
    content = [json.loads(storage.read(name)) for name in names]
    assert [item["attempt"] for item in content] == list(range(1, 13))
    assert {item["schema_version"] for item in content} == {1}


def test_two_writers_never_take_the_same_number(storage):
    class Late(LocalStorage):
        """Another writer comes between the look and the write."""

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


def test_what_a_supervisor_writes_after_it_was_succeeded_is_void(storage):
    """It looked at the lease, was stopped for long, and writes when it wakes up."""
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


def test_another_schema_version_is_refused_by_name(ledger, storage):
    ledger.record(started(1))
    (name,) = storage.list()
    content = json.loads(storage.read(name)) | {"schema_version": 2}
    storage.write(name, json.dumps(content).encode())
    with pytest.raises(BadInput, match="schema version 2"):
        ledger.history()

"""A checkpoint is written while training continues, or training waits and says so."""

from __future__ import annotations

import threading

import pytest

from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.train.checkpoint import CheckpointStore, newest
from steadytrain.components.train.checkpoint.saver import Saver
from steadytrain.components.train.failures import NonFiniteState

from support.checkpoints import same
from support.saving import SECONDS, World, saver, state, tensors


class Slow:
    """Storage that waits for permission before it writes tensors."""

    def __init__(self, monkeypatch):
        self.reached, self.let_on = threading.Event(), threading.Event()
        write = LocalStorage.write_stream

        def slow(storage, name, parts, *, size=0):
            self.reached.set()
            assert self.let_on.wait(SECONDS)
            write(storage, name, parts, size=size)

        monkeypatch.setattr(LocalStorage, "write_stream", slow)


@pytest.fixture
def slow(monkeypatch):
    found = Slow(monkeypatch)
    yield found
    found.let_on.set()


@pytest.fixture
def alone():
    world = World(1)
    world.rank.number = 0
    return world


def test_later_updates_do_not_reach_a_snapshot(folder, slow, alone):
    own = saver(alone, 0, CheckpointStore(folder, keep=2))
    live = state(1.0)
    own.save(1, 0, lambda: live)
    assert slow.reached.wait(SECONDS)
    for pieces in live.parts.values():
        for piece in pieces:
            piece.values.add_(5)
    live.shared["value"] = 6.0
    slow.let_on.set()
    own.settle()

    assert all(same(newest(folder).tensors(part), found) for part, found in tensors().items())
    assert newest(folder).state() == {"value": 1.0}


def test_second_save_waits_for_the_first_and_reports_its_wait(folder, slow, alone):
    told = []
    own = saver(alone, 0, CheckpointStore(folder, keep=2), told)
    own.save(1, 0, state)

    waits = threading.Event()
    own.on_wait = waits.set

    def second():
        alone.rank.number = 0
        own.save(2, 0, lambda: state(2.0))

    thread = threading.Thread(target=second)
    thread.start()
    assert waits.wait(SECONDS)
    assert thread.is_alive()
    assert told == []
    slow.let_on.set()
    thread.join(SECONDS)
    own.settle()

    assert [saved.checkpoint.step for saved in told] == [1, 2]
    assert told[0].blocking_seconds > 0.1
    assert newest(folder).state() == {"value": 2.0}


def test_without_a_snapshot_training_waits_and_nothing_is_copied(folder, slow, alone):
    waited, live = threading.Event(), state()

    def waits():
        waited.set()
        slow.let_on.set()

    own = Saver(
        CheckpointStore(folder, keep=2),
        rank=0,
        world_size=1,
        gather=alone.gather,
        on_saved=lambda saved: None,
        on_wait=waits,
        snapshot=False,
    )
    own.save(1, 0, lambda: live)
    assert waited.is_set()
    assert newest(folder).step == 1
    live.parts["model"][0].values.fill_(float("nan"))
    with pytest.raises(NonFiniteState, match="model/weight"):
        own.save(2, 0, lambda: live)
    assert newest(folder).step == 1


def test_failed_training_waits_for_a_pending_write(folder, slow, alone):
    late, in_time = (
        saver(alone, 0, CheckpointStore(folder / name, keep=2)) for name in ("late", "in_time")
    )
    late.save(1, 0, state)
    late.abandon(0.01)
    assert newest(folder / "late") is None

    in_time.save(1, 0, state)
    slow.let_on.set()
    in_time.abandon(SECONDS)
    in_time.abandon(SECONDS)

    assert newest(folder / "in_time").step == 1


def test_step_committed_by_another_attempt_is_not_saved_again(folder, alone):
    first, second = (saver(alone, 0, CheckpointStore(folder, keep=2)) for _ in range(2))
    first.save(1, 0, state)
    first.settle()

    second.save(1, 0, lambda: pytest.fail("it is there already"))
    second.settle()

    assert newest(folder).state() == {"value": 1.0}

"""A COMMIT that comes too late, after another supervisor took over the run, is never used."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging

import pytest

from steadytrain.components.shared.errors import RunBusy
from steadytrain.components.shared.events.types import SupervisorStarted
from steadytrain.components.shared.lease import hold
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.checkpoint import (
    CheckpointDamaged,
    CheckpointStore,
    Lineage,
    newest,
    survey,
)
from steadytrain.components.train.checkpoint.manifest import COMMIT, DAMAGED
from steadytrain.components.train.checkpoint.store import committed
from steadytrain.components.train.recovery.ledger import Ledger

from support.checkpoints import PARTS, same, save, shifted


class Run:
    """The lease and ledger of a run, for every supervisor that takes it over."""

    def __init__(self, root, address):
        self.leases, self.address = LocalStorage(root / "lease"), address
        self.workspace = Workspace(root, "run")
        self.ledger = Ledger(self.workspace)

    @contextlib.contextmanager
    def supervised(self):
        """Act as a supervisor, as far as checkpoints can tell, and yield the store for its ranks.

        The previous supervisor has been silent for so long that the run is free.
        """
        if self.ledger.lease is not None:
            self.ledger.lease.release()
        self.ledger = Ledger(self.workspace)
        with hold(self.leases, run_id="run", seconds=60) as self.ledger.lease:
            lease = self.ledger.lease
            found = survey(self.address, self.lineage)
            self.ledger.record(
                SupervisorStarted(
                    generation=lease.generation, pid=1, host="here", checkpoints=found
                )
            )
            yield CheckpointStore(self.address, keep=1, fence=lease.fence, lineage=self.lineage)

    @property
    def lineage(self):
        """The lineage that anyone can read from the ledger."""
        return Lineage.of(self.ledger.history().supervisor)

    def newest(self):
        return newest(self.address, self.lineage)


@pytest.fixture
def run(tmp_path, address):
    return Run(tmp_path, address)


def commit_late(run, store, step):
    """Check the lease, sleep while another supervisor takes over the run, then commit."""
    look = store.fence

    def look_and_sleep():
        look()
        with run.supervised():
            pass

    store.fence = look_and_sleep
    try:
        return save(store, step, parts=shifted(1))
    finally:
        store.fence = look


def test_late_commit_is_reported_set_aside_and_never_used(run, caplog):
    with run.supervised() as store:
        save(store, 4)
        late = commit_late(run, store, 8)

    with caplog.at_level(logging.WARNING):
        found = run.newest()

    assert found == store.path(4)
    assert same(found.tensors("model"), PARTS["model"])
    assert f"{store.path(8)} was committed by generation 1" in caplog.text
    assert "after generation 2 had taken over" in caplog.text
    left = store.path(8).storage.list()
    assert DAMAGED in left
    assert COMMIT not in left
    assert late.generation == 1


def test_later_supervisors_ignore_a_late_commit_too(run):
    with run.supervised() as store:
        save(store, 4)
        commit_late(run, store, 8)
    for _ in range(2):
        with run.supervised():
            pass
    assert run.newest() == store.path(4)


@pytest.mark.slow
def test_checkpoints_found_at_each_takeover_stay_valid(run):
    for step in (4, 8, 12):
        with run.supervised() as store:
            save(store, step)
    with run.supervised() as last:
        assert [last.has(step) for step in (4, 8, 12, 16)] == [True, True, True, False]
    assert [item.manifest.generation for item in committed(run.address)] == [1, 2, 3]
    assert run.newest() == store.path(12)


def test_step_that_was_committed_too_late_is_saved_again(run):
    with run.supervised() as store:
        save(store, 4)
        commit_late(run, store, 8)
    with run.supervised() as now:
        with pytest.raises(CheckpointDamaged, match="generation 1"):
            now.load(8, "model")
        assert not now.has(8)
        now.retain(save(now, 8), best_step=0)
        assert same(now.load(8, "model"), PARTS["model"])
    assert [item.manifest.generation for item in committed(run.address)] == [3]


def test_late_commit_does_not_evict_a_good_checkpoint(run):
    """The late checkpoint has the highest step. With keep=1, the valid one must be the one kept."""
    with run.supervised() as store:
        commit_late(run, store, 8)
    with run.supervised() as now:
        now.retain(save(now, 4), best_step=0)
    assert run.newest() == now.path(4)


@pytest.mark.slow
def test_superseded_rank_removes_nothing(run):
    """It removes neither old checkpoints nor what looks like the remains of a killed save."""
    with run.supervised() as store:
        save(store, 4)
        late = commit_late(run, store, 8)
        with run.supervised() as now:
            now.path(6).storage.write("abc-rank-0000.json", b"{}")
            for remove in (lambda: store.retain(late, best_step=0), store.begin):
                with pytest.raises(RunBusy, match="taken over"):
                    remove()
    assert now.path(6).storage.list() == ["abc-rank-0000.json"]
    assert run.newest() == store.path(4)


def test_superseded_rank_leaves_newer_checkpoints_alone(run):
    with run.supervised() as old:
        pass
    with run.supervised() as now:
        save(now, 4)
        assert old.has(4)
    assert run.newest() == now.path(4)


def test_damage_is_not_reported_as_a_late_commit(run, caplog):
    with run.supervised() as store:
        save(store, 4)
        save(store, 8)
        storage = store.path(8).storage
        (manifest,) = (name for name in storage.list() if name.endswith("manifest.json"))
        storage.write(manifest, b"{}")
    with run.supervised(), caplog.at_level(logging.WARNING):
        assert run.newest() == store.path(4)
    assert "its digest differs from the committed one" in caplog.text


def test_ledger_without_checkpoints_accepts_all(run):
    with run.supervised() as store:
        save(store, 4)
    for ledger in (None, SupervisorStarted(generation=9, pid=1, host="here")):
        assert newest(run.address, Lineage.of(ledger)) == store.path(4)


def test_checkpoints_of_the_previous_version_are_read(run):
    """They have no generation. A supervisor that takes over the run finds them, and they count."""
    store = CheckpointStore(run.address, keep=1)
    save(store, 4)
    storage = store.path(4).storage
    (name,) = (name for name in storage.list() if name.endswith("manifest.json"))
    content = json.loads(storage.read(name)) | {"schema_version": 2}
    del content["generation"]
    body = json.dumps(content).encode()
    storage.write(name, body)
    storage.write(COMMIT, f"{hashlib.sha256(body).hexdigest()}  {name}\n".encode())
    with run.supervised() as now:
        assert run.newest() == store.path(4)
        assert same(now.load(4, "model"), PARTS["model"])

"""What an exit handler removes, and what it leaves alone."""

from __future__ import annotations

import time

import pytest

from steadytrain.components.shared import retry
from steadytrain.components.shared.lease import Generations, Holder, hold
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.launch import removal
from steadytrain.components.train.launch.job import TRAIN_JOB
from steadytrain.components.train.launch.naming import FOLDER, run_labels
from steadytrain.components.train.launch.removal import (
    remove_jobs,
    remove_unfinished,
    remove_unfinished_below,
)


@pytest.fixture
def run(api, config, monkeypatch):
    """A run on the cluster with a leftover job."""
    made = config(launcher="auto", recovery={"lease_seconds": 0.5})
    workspace = Workspace.of(made)
    workspace.create()
    monkeypatch.setattr(removal, "connect", lambda: api[1])
    monkeypatch.setattr(removal, "this_pod_name", lambda: "report-1")
    api[0].put("trainjobs", labelled("tiny-a1", workspace.attempts / "0001"))
    api[0].put("trainjobs", labelled("elsewhere-a1", "/elsewhere/runs/tiny/attempts/0001"))
    return made


def labelled(name, folder):
    metadata = {"name": name, "labels": run_labels("tiny"), "annotations": {FOLDER: str(folder)}}
    return {"metadata": metadata}


def test_leftovers_of_the_run_are_removed(api, run):
    assert remove_unfinished(run) == []
    assert api[0].names("trainjobs") == ["elsewhere-a1"]


def test_job_is_suspended_before_it_is_deleted(api, run):
    assert remove_unfinished(run) == []
    assert api[0].suspended == ["tiny-a1"]
    changes = [call for call in api[0].calls if call[0] in ("PATCH", "DELETE")]
    assert changes[:2] == [("PATCH", "trainjobs"), ("DELETE", "trainjobs")]


@pytest.mark.parametrize("answers", [(403, "Forbidden"), (500, "InternalError"), None])
def test_job_that_cannot_be_suspended_is_deleted_all_the_same(api, run, monkeypatch, answers):
    server, _ = api
    monkeypatch.setattr(removal, "_SUSPENDED_SECONDS", 0.1)
    before = server.answer

    def answer(method, path, body):
        if method != "PATCH":
            return before(method, path, body)
        # None: the controller is away, so that the job never counts as suspended.
        return (answers[0], {"message": "no", "reason": answers[1]}) if answers else (200, {})

    monkeypatch.setattr(server, "answer", answer)
    assert remove_unfinished(run) == []
    assert server.names("trainjobs") == ["elsewhere-a1"]


def test_leftovers_of_all_runs_in_a_folder_are_removed_once_their_driver_is_gone(
    api, run, tmp_path
):
    lease = LocalStorage(tmp_path / "study" / "lease")
    for number in (0, 1):
        attempts = Workspace(tmp_path / "study" / f"{number:04d}", "tiny").attempts
        api[0].put("trainjobs", labelled(f"tiny-{number:04d}-a1", attempts / "0001"))
    before = api[0].names("trainjobs")
    with hold(lease, run_id="study", seconds=60):
        assert remove_unfinished_below(run, tmp_path / "study", lease) == []
    assert api[0].names("trainjobs") == before
    assert remove_unfinished_below(run, tmp_path / "study", lease) == []
    assert api[0].names("trainjobs") == ["elsewhere-a1", "tiny-a1"]


def test_active_supervisor_keeps_its_job(api, run):
    with hold(LocalStorage(Workspace.of(run).lease), run_id="tiny", seconds=60):
        assert remove_unfinished(run) == []
    assert api[0].names("trainjobs") == ["elsewhere-a1", "tiny-a1"]


def test_job_of_a_dead_supervisor_whose_clock_was_ahead_is_removed(api, run):
    lease = LocalStorage(Workspace.of(run).lease)
    holder = Holder.here().model_copy(
        update={"machine": "elsewhere", "until": time.time() + 6 * 3600, "seconds": 0.5}
    )
    lease.write(Generations(lease).name(1), holder.model_dump_json().encode())
    assert remove_unfinished(run) == []
    assert api[0].names("trainjobs") == ["elsewhere-a1"]


def test_nothing_to_remove_without_trainer(api, run, monkeypatch):
    monkeypatch.setattr(api[1], "offers", lambda _: False)
    assert remove_unfinished(run) == []
    assert "tiny-a1" in api[0].names("trainjobs")


def test_server_that_does_not_answer_is_reported(api, run, monkeypatch):
    monkeypatch.setattr(retry, "AWAY_SECONDS", 0.0)
    api[0].away = True
    (told,) = remove_unfinished(run)
    assert "API server" in told


def test_no_server_is_asked_outside_of_a_pipeline(api, run, monkeypatch):
    monkeypatch.setattr(removal, "this_pod_name", lambda: "")
    assert remove_unfinished(run) == []
    assert api[0].calls == []


def test_objects_that_stay_are_reported(api, run):
    server, here = api
    attempts = Workspace.of(run).attempts
    server.put("pods", labelled("held-by-a-dead-kubelet", attempts / "0001"))
    assert remove_jobs(here, "tiny", attempts, (TRAIN_JOB,), seconds=3) == [
        "held-by-a-dead-kubelet"
    ]
    assert server.names("trainjobs") == ["elsewhere-a1"]


def test_returning_server_is_waited_for(api, run):
    server, here = api
    server.away = True

    def wait(_):
        server.away = False

    attempts = Workspace.of(run).attempts
    assert remove_jobs(here, "tiny", attempts, (TRAIN_JOB,), seconds=0.0, wait=wait) == ["tiny-a1"]
    assert server.names("trainjobs") == ["elsewhere-a1"]

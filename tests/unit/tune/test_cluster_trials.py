"""Trials in the pods of a cluster: their configurations, and jobs of drivers that are gone."""

from __future__ import annotations

import subprocess
import sys

import pytest

from steadytrain.components.shared import retry
from steadytrain.components.shared.config import from_mapping, load
from steadytrain.components.train.launch import launcher
from steadytrain.components.train.launch.job import TRAIN_JOB, TrainJob
from steadytrain.components.train.launch.naming import FOLDER, run_labels
from steadytrain.components.tune.search import STUDY, ClusterTrials, RanksInPods, trials_for
from steadytrain.components.tune.trials.folder import TrialFolder
from steadytrain.components.tune.trials.local import LocalTrials
from steadytrain.components.tune.trials.process import warn

from support.api_server import serving


@pytest.fixture
def api():
    with serving() as (server, cluster):
        yield server, cluster


@pytest.fixture
def config():
    return from_mapping(
        {
            "name": "tiny",
            "data": {"source": ["unused"]},
            "model": {"config": {"model_type": "llama"}},
            "compute": {"nodes": 2, "pods": {"labels": {"team": "nlp"}}},
            "recovery": {"stop_grace_seconds": 5},
            "tune": {"budget": {"parallel": 3}},
        }
    )


@pytest.fixture
def study(tmp_path):
    return tmp_path / "studies" / "tiny-1a2b3c4d"


@pytest.fixture
def trials(api, study):
    told = []
    made = ClusterTrials(study, 2, api[1], TrainJob, 0.5, told.append)
    made.told = told
    return made


def leave_job(server, study, number, attempt, *, plural="trainjobs"):
    """Put an object of a trial's attempt on the server, as a driver that is gone left it."""
    place = TrialFolder(study, number)
    name = f"{place.run}-a{attempt}"
    folder = place.workspace.attempts / f"{attempt:04d}"
    metadata = {
        "name": name,
        "labels": run_labels(place.run),
        "annotations": {FOLDER: str(folder)},
    }
    server.put(plural, {"metadata": metadata})
    return name


def test_next_driver_removes_the_jobs_of_its_study_and_no_others(api, study, trials):
    for number, attempt in ((0, 1), (1, 2)):
        leave_job(api[0], study, number, attempt)
        leave_job(api[0], study, number, attempt, plural="trainingruntimes")
    others = leave_job(api[0], study.with_name("another"), 0, 1)
    assert trials.attach() == frozenset()
    assert api[0].names("trainjobs") == [others]
    assert api[0].names("trainingruntimes") == []


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_driver_that_ends_leaves_no_job(api, study, trials, monkeypatch, error):
    def close(_, *, within):
        leave_job(api[0], study, 0, 1)
        if error:
            raise error

    monkeypatch.setattr(LocalTrials, "close", close)
    if error:
        with pytest.raises(error):
            trials.close()
    else:
        trials.close()
    assert api[0].names("trainjobs") == []
    assert not trials.told


def test_jobs_that_cannot_be_removed_are_reported(api, study, trials, monkeypatch):
    name = leave_job(api[0], study, 0, 1, plural="pods")
    trials.attach()
    monkeypatch.setattr(retry, "AWAY_SECONDS", 0.0)
    api[0].away = True
    trials.attach()
    stuck, away = trials.told
    assert name in stuck
    assert "API server" in away


def test_trial_keeps_its_nodes_and_its_jobs_get_the_studys_label(
    trials, study, config, monkeypatch
):
    asked = []
    monkeypatch.setattr(
        LocalTrials, "_start", lambda _, number, trial, slot: asked.append((number, trial.until))
    )
    trials.train(3, config, 20)
    assert asked == [(3, 20)]
    own = load(TrialFolder(study, 3).config).compute
    assert (own.launcher, own.nodes, own.threads_per_rank) == ("auto", 2, None)
    assert own.pods.labels == {"team": "nlp", STUDY: "tiny-1a2b3c4d"}


def test_driver_prints_once_what_a_trial_waits_for(trials, study, config, monkeypatch):
    place = TrialFolder(study, 3)
    warn(place.workspace, "told by the driver before")
    monkeypatch.setattr(LocalTrials, "_start", lambda *_: None)
    trials.train(3, config, 20)
    trials.state(3)
    warn(place.workspace, "waits: Insufficient cpu")
    for _ in range(2):
        assert trials.state(3).condition == "running"
    assert trials.told == ["trial 3: waits: Insufficient cpu"]


@pytest.mark.slow
def test_supervisors_share_one_process_without_torch_that_can_be_forked():
    imports = ["steadytrain.components.tune.trials.process", *RanksInPods.imports]
    code = (
        "import sys, importlib; from steadytrain.components.train.agent import forking\n"
        f"forking.prepare({imports!r})\n"
        "assert forking.possible() and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("in_pod", "kind"), [(True, ClusterTrials), (False, LocalTrials)])
def test_trials_are_where_the_configuration_says(api, study, config, monkeypatch, in_pod, kind):
    monkeypatch.setattr(launcher, "this_pod_name", lambda: "tune-1" if in_pod else "")
    monkeypatch.setattr(launcher, "connect", lambda: api[1])
    monkeypatch.setattr(api[1], "offers", lambda found: found == TRAIN_JOB)
    made = trials_for(study, config, print, ())
    assert isinstance(made, kind)
    if in_pod:
        assert made.seconds == 95

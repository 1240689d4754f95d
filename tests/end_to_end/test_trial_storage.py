"""Trials whose checkpoints are on S3, and a study on a disk that fills up."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from steadytrain.components.shared.config import Dimension, TuneConfig
from steadytrain.components.shared.config.tune import TuneBudget
from steadytrain.components.shared.errors import StorageError
from steadytrain.components.shared.events.types import Validated
from steadytrain.components.tune.driver import drive
from steadytrain.components.tune.log import MemoryLog
from steadytrain.components.tune.study import Study
from steadytrain.components.tune.trials.folder import TrialFolder
from steadytrain.components.tune.trials.local import local_trials

from support import trials as support
from support import whole_runs
from support.disks import small_file_system
from support.forked import train
from support.s3 import client_of, make_bucket, moto_server, set_credentials
from support.synthetic_trials import Quiet
from support.training import Bench, events_of, language_rows, weights_digest, write_data

RECIPE = {**whole_runs.RECIPE, "max_steps": 8}
TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, data):
    def make(**recovery):
        return Bench.make(
            tmp_path_factory.mktemp("recipe"),
            data,
            training=RECIPE,
            compute={"device": "cpu", "threads_per_rank": 1},
            recovery={"backoff_seconds": 0, **recovery},
        )

    return make


@pytest.fixture(scope="module")
def undisturbed(recipe):
    """A run that was never cut, with its checkpoints on a disk with space."""
    bench = recipe()
    train(bench)
    return bench.workspace


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{TESTS}:{os.environ.get('PYTHONPATH', '')}")


@pytest.fixture
def attached():
    """Open the trials of a study, and end their processes after the test."""
    with contextlib.ExitStack() as stack:

        def attach(study):
            trials = local_trials(study)
            trials.attach()
            stack.callback(trials.close)
            return trials

        yield attach


def test_trial_with_checkpoints_on_s3_continues_from_them_and_leaves_none(
    tmp_path, recipe, undisturbed, attached, monkeypatch
):
    with moto_server() as port:
        make_bucket(port, "bucket")
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        set_credentials(monkeypatch)
        bench = recipe(checkpoints="s3://bucket/runs")
        study = tmp_path / "study"
        support.share_data(study, bench.config, bench.data)

        def stored():
            found = client_of(port).list_objects_v2(Bucket="bucket").get("Contents", [])
            return [item["Key"] for item in found]

        trials = attached(study)
        trials.train(0, bench.config, 4)
        assert support.ended(trials, 0).condition == "paused"
        assert any(name.startswith("runs/study-0000/") for name in stored())
        assert not list(TrialFolder(study, 0).path.rglob("*/checkpoints/*/*.safetensors"))
        trials.train(0, bench.config, 8)
        assert support.ended(trials, 0).condition == "finished"
        assert weights_digest(TrialFolder(study, 0).workspace) == weights_digest(undisturbed)
        trials.discard(0)
        assert not stored()


def test_study_on_a_full_disk_stops_and_continues_once_there_is_space(
    tmp_path, recipe, undisturbed
):
    with small_file_system(tmp_path / "disk", "size=64m") as disk:
        bench, study = recipe(max_failures_per_class=1), disk / "study"
        rate = bench.config.training.learning_rate
        tune = TuneConfig(
            space={"training.learning_rate": Dimension(low=1e-3, high=1e-2)},
            budget=TuneBudget(trials=1),
        )
        config = bench.config.model_copy(update={"tune": tune})
        rows = write_data(disk / "data", language_rows(60), language_rows(8, seed=1))
        support.share_data(study, bench.config, rows)
        log = MemoryLog()

        def driven(watcher):
            found = Study(config, log, first=lambda: [{"training.learning_rate": rate}])
            drive(found, local_trials(study), watcher, lambda: None)
            return found

        with pytest.raises(StorageError, match="the storage of trial 0 failed"):
            driven(FillsUp(disk / "ballast"))
        (disk / "ballast").unlink()
        (trial,) = driven(Quiet()).history.trials
        assert trial.status == "finished"
        expected = [(item.step, item.metrics) for item in events_of(undisturbed, Validated)]
        assert trial.curve == expected


class FillsUp(Quiet):
    """The disk of a study, which is full once a trial is paused."""

    def __init__(self, ballast):
        self.ballast = ballast

    def ended(self, study, trial):
        assert trial.status == "paused"
        fill(self.ballast)


def fill(path):
    """Fill a disk but for the few blocks that events need."""
    with path.open("wb", buffering=0) as ballast:
        with contextlib.suppress(OSError):
            while True:
                ballast.write(b"0" * 4096)
        ballast.truncate(path.stat().st_size - 32 * 4096)

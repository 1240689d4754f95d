"""Trials whose checkpoints are on S3, and trials on a disk that fills up."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from steadytrain.components.tune.trials.local import local_trials
from steadytrain.components.tune.trials.place import TrialFolder

from support import trials as support
from support.disks import small_file_system
from support.forked import train
from support.s3 import client_of, make_bucket, moto_server
from support.training import Bench, language_rows, weights_digest, write_data

pytestmark = pytest.mark.slow
RECIPE = {
    "max_steps": 8,
    "global_batch_size": 4,
    "micro_batch_size": 2,
    "learning_rate": 5e-3,
    "eval_steps": 4,
    "save_steps": 4,
    "logging_steps": 1,
}
TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, data):
    def make(**recovery):
        return Bench.make(
            tmp_path_factory.mktemp("recipe"),
            data,
            training=RECIPE,
            compute={"device": "cpu", "threads_per_rank": 1},
            recovery={"backoff_seconds": 0, "lease_seconds": 20, **recovery},
        )

    return make


@pytest.fixture(scope="module")
def undisturbed(recipe):
    """The weights of a run that was never cut, with its checkpoints on a disk with space."""
    bench = recipe()
    train(bench)
    return weights_digest(bench.workspace)


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
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
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
        assert weights_digest(TrialFolder(study, 0).workspace) == undisturbed
        trials.discard(0)
        assert not stored()


def test_trial_on_a_full_disk_fails_and_continues_once_there_is_space(
    tmp_path, recipe, undisturbed, attached
):
    with small_file_system(tmp_path / "disk", "size=64m") as disk:
        bench, study = recipe(max_failures_per_class=1), disk / "study"
        rows = write_data(disk / "data", language_rows(60), language_rows(8, seed=1))
        support.share_data(study, bench.config, rows)
        trials = attached(study)
        trials.train(0, bench.config, 4)
        assert support.ended(trials, 0).condition == "paused"
        fill(disk / "ballast")
        trials.train(0, bench.config, 8)
        failed = support.ended(trials, 0)
        assert (failed.condition, failed.failure) == ("failed", "storage")
        (disk / "ballast").unlink()
        trials.train(0, bench.config, 8)
        assert support.ended(trials, 0).condition == "finished"
        assert weights_digest(TrialFolder(study, 0).workspace) == undisturbed


def fill(path):
    """Fill a disk but for the few blocks that events need."""
    with path.open("wb", buffering=0) as ballast:
        with contextlib.suppress(OSError):
            while True:
                ballast.write(b"0" * 4096)
        ballast.truncate(path.stat().st_size - 32 * 4096)

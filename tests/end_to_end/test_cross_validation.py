"""A real cross-validation that is killed gives the predictions of one that nobody disturbed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pyarrow.parquet as pq
import pytest

from steadytrain.components.shared.config import load
from steadytrain.components.shared.events.types import AttemptEnded
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tune.designs import as_cross_validation
from steadytrain.components.tune.driver import study_folder
from steadytrain.components.tune.trials.folder import TrialFolder, trials_of

from support import trials as support
from support.command import TINY_LM, wait_for
from support.training import events_of

SETS = (
    *TINY_LM,
    "compute.device=cpu",
    "recovery.backoff_seconds=0",
    "training.max_steps=4",
    "training.eval_steps=2",
    "training.save_steps=2",
    "cross_validation.folds=2",
    "evaluation.max_examples=null",
    "tracking.sinks=[]",
)


def start(output):
    """Start the command; return its process and the folder of the study."""
    sets = [part for item in SETS for part in ("--set", item)]
    words = ["cross-validate", "causal-lm", "--json", "--output", str(output), *sets]
    process = subprocess.Popen(
        [sys.executable, "-m", "steadytrain.pipelines.cli", *words],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    config = as_cross_validation(load("causal-lm", [*SETS, f"output={output}"]))
    return process, study_folder(config)


def finish(process):
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err.decode()
    return json.loads(out)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    process, folder = start(tmp_path_factory.mktemp("undisturbed"))
    return finish(process), folder


def test_every_training_record_is_predicted_once_by_a_model_that_never_saw_it(undisturbed):
    told, folder = undisturbed
    assert told["trials"] == 2
    predicted = pq.read_table(folder / "out-of-fold.parquet")
    whole = DataRecord.load(folder / "runs" / "prepare" / "records" / "preprocess.json")
    card = json.loads(whole.path("card.json").read_text())
    assert len(set(predicted["id"].to_pylist())) == card["sides"]["train"]["documents"]
    assert predicted.num_rows == card["sides"]["train"]["documents"]
    # The runs share the encoded data, and nothing that they are given names the test side.
    (shared,) = (folder / "data").iterdir()
    linked = [path for path in (trials_of(folder) / "data").rglob("*") if path.is_file()]
    encoded = {path.stat().st_ino for path in shared.rglob("fold-*/*")}
    assert {path.stat().st_ino for path in linked if "fold-" in str(path)} <= encoded
    assert not [path for path in linked if path.name.startswith("test")]
    assert not [path for path in linked if path.parent.name == "test"]


@pytest.mark.long
def test_killed_after_its_first_fold_it_continues_to_the_same_predictions(undisturbed, tmp_path):
    told, folder = undisturbed
    process, own = start(tmp_path)
    trial = TrialFolder(own, 0)
    wait_for(lambda: trial.workspace.events.exists())
    wait_for(lambda: events_of(trial.workspace, AttemptEnded))
    process.send_signal(signal.SIGKILL)
    support.kill(support.processes(own))
    process.communicate()
    again = finish(start(tmp_path)[0])
    for key in ("configurations", "comparisons", "trials"):
        assert again[key] == told[key]
    name = "out-of-fold.parquet"
    assert (own / name).read_bytes() == (folder / name).read_bytes()

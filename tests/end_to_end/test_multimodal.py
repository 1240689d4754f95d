"""A table with texts and images to a registered model: killed, resumed, gated, served elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from steadytrain.components.shared.records import EvaluationRecord, RegistrationRecord, TrainRecord
from steadytrain.components.shared.workspace import Workspace

from support.command import finish, kill_held
from support.mixed import MIXED, write_mixed

SERVE = """
import json, sys

class WithoutSteadytrain:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "steadytrain":
            raise ImportError(name)

sys.meta_path.insert(0, WithoutSteadytrain())
import mlflow, numpy, pandas
from pathlib import Path

mlflow.set_tracking_uri(sys.argv[1])
model = mlflow.pyfunc.load_model(sys.argv[2])
table = Path(sys.argv[3])
frame = pandas.read_csv(table)
frame["picture"] = [(table.parent / name).read_bytes() for name in frame["picture"]]
found = model.predict(frame.drop(columns="kind"))
print(json.dumps({"prediction": found["prediction"].tolist(), "target": frame["kind"].tolist()}))
"""


@pytest.mark.slow
def test_mixed_table_is_trained_killed_resumed_gated_registered_and_served(steadytrain, tmp_path):
    table = write_mixed(tmp_path / "data", 600)

    fields = (f"data.source=[{table}]", *MIXED)
    held, sets = steadytrain.held(20), (*fields, "run=killed", "training.save_steps=10")
    killed = steadytrain.start("multimodal", *sets, **held.everywhere)
    workspace = Workspace(steadytrain.output, "killed")
    kill_held(held, killed)
    finish(killed, 900)
    # tests/unit/multimodal/test_training.py compares the weights with those of an undisturbed run.
    assert TrainRecord.load(workspace.record("train")).attempts == 2
    evaluation = EvaluationRecord.load(workspace.record("evaluate"))
    assert evaluation.metrics["accuracy"].value > 0.8 > evaluation.baselines["accuracy"]
    registered = RegistrationRecord.load(workspace.record("promote"))
    assert registered.champion
    address = f"{registered.model_name}@champion"
    scored = steadytrain("predict", address, table, "--output", steadytrain.output)
    assert scored.code == 0, scored.err
    done = subprocess.run(
        [
            *(sys.executable, "-c", SERVE, f"sqlite:///{steadytrain.output / 'mlflow.db'}"),
            *(registered.model_uri, str(table)),
        ],
        env=steadytrain.environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    hits = [a == b for a, b in zip(found["prediction"], found["target"], strict=True)]
    assert sum(hits) / len(hits) > 0.85
    rows = [json.loads(line) for line in scored.out.splitlines()]
    assert [row["prediction"] for row in rows] == found["prediction"]

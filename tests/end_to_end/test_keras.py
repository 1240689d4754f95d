"""A network of Keras from a CSV file to a registered model: killed, resumed, and served elsewhere.

`make test-all` runs it with TensorFlow, and `make long` with JAX.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pyarrow.parquet as pq
import pytest

from steadytrain.components.shared.records import EvaluationRecord, RegistrationRecord, TrainRecord
from steadytrain.components.shared.workspace import Workspace

from support.command import finish, kill_paused
from support.tables import shipped, write_csv

BACKEND = "tensorflow" if importlib.util.find_spec("tensorflow") else "jax"
SERVE = """
import json, sys

class NumpyAlone:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("steadytrain", "keras", "jax", "tensorflow", "torch"):
            raise ImportError(name)

sys.meta_path.insert(0, NumpyAlone())
import mlflow, pandas
mlflow.set_tracking_uri(sys.argv[1])
frame = pandas.read_csv(sys.argv[3]).drop(columns="target")
print(json.dumps(mlflow.pyfunc.load_model(sys.argv[2]).predict(frame)["prediction"].tolist()))
"""


@pytest.mark.long
def test_network_of_keras_is_killed_resumed_registered_and_served_without_keras(
    steadytrain, tmp_path
):
    frame = shipped("breast_cancer")
    frame["size"] = (frame["mean radius"] > 14).map({True: "large", False: "small"})
    source = write_csv(tmp_path, frame)

    fields = (
        *(f"data.source=[{source}]", "data.target=target"),
        *(f"model.framework={BACKEND}", "model.config={model_type: mlp, width: 64}"),
        *("training.max_steps=60", "training.early_stopping_patience=15"),
        "training.class_weights={kind: balanced}",
    )
    pause, sets = steadytrain.pause(4), (*fields, "run=killed", "training.save_steps=1")
    killed = steadytrain.start("tabular", *sets, **pause.everywhere)
    workspace = Workspace(steadytrain.output, "killed")
    kill_paused(pause, killed)
    finish(killed)
    # tests/unit/tabular/test_keras.py compares the model with that of an undisturbed run.
    assert TrainRecord.load(workspace.record("train")).attempts == 2
    evaluation = EvaluationRecord.load(workspace.record("evaluate"))
    assert evaluation.metrics["accuracy"].value > 0.9 > evaluation.baselines["accuracy"]
    registered = RegistrationRecord.load(workspace.record("promote"))
    store = f"sqlite:///{steadytrain.output / 'mlflow.db'}"
    done = subprocess.run(
        [sys.executable, "-c", SERVE, store, registered.model_uri, str(source)],
        env=steadytrain.environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    served = json.loads(done.stdout.splitlines()[-1])
    assert (frame["target"] == served).mean() > 0.95
    out = tmp_path / "predictions.parquet"
    address = f"{registered.model_name}@champion"
    done = steadytrain("predict", address, source, "--out", out, "--output", steadytrain.output)
    assert done.code == 0, done.err
    assert pq.read_table(out)["prediction"].to_pylist() == served

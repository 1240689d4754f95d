"""A table with texts and images to a registered model: killed, resumed, gated, served elsewhere."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from urllib.request import Request, urlopen

import pytest

from steadytrain.components.shared.records import EvaluationRecord, RegistrationRecord, TrainRecord
from steadytrain.components.shared.workspace import Workspace

from support.command import finish, kill_paused
from support.mixed import MIXED, add_backs, write_mixed
from support.without_steadytrain import PROGRAM as WITHOUT_STEADYTRAIN

SERVE = (
    WITHOUT_STEADYTRAIN
    + """import mlflow, numpy, pandas
from pathlib import Path

mlflow.set_tracking_uri(sys.argv[1])
model = mlflow.pyfunc.load_model(sys.argv[2])
table = Path(sys.argv[3])
frame = pandas.read_csv(table)
frame["picture"] = [(table.parent / name).read_bytes() for name in frame["picture"]]
found = model.predict(frame.drop(columns="kind"))
print(json.dumps({"prediction": found["prediction"].tolist(), "target": frame["kind"].tolist()}))
"""
)


@pytest.mark.slow
def test_mixed_table_is_trained_killed_resumed_gated_registered_and_served(steadytrain, tmp_path):
    table = write_mixed(tmp_path / "data", 600)

    fields = (f"data.source=[{table}]", *MIXED)
    pause, sets = steadytrain.pause(20), (*fields, "run=killed", "training.save_steps=10")
    killed = steadytrain.start("multimodal", *sets, **pause.everywhere)
    workspace = Workspace(steadytrain.output, "killed")
    kill_paused(pause, killed)
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


@pytest.mark.long
def test_records_with_several_pictures_are_predicted_and_served_alike(steadytrain, tmp_path):
    table = write_mixed(tmp_path / "data", 200)
    rows = add_backs(table)
    fields = [f"data.source=[{table}]", *MIXED[:-2], "training.num_train_epochs=2"]
    done = steadytrain.run("multimodal", *fields, "data.columns.image=[picture, back]", "run=two")
    assert done.code == 0, done.err
    address = "models:/multimodal/1"
    scored = steadytrain("predict", address, table, "--output", steadytrain.output)
    assert scored.code == 0, scored.err
    expected = [json.loads(line) for line in scored.out.splitlines()]
    assert len(expected) == len(rows)
    records = rows.drop(columns="kind").to_dict("records")
    for record in records:
        for column in ("picture", "back"):
            picture = table.parent / record[column]
            record[column] = (
                base64.b64encode(picture.read_bytes()).decode() if record[column] else None
            )
    turned = [
        {**record, "picture": record["back"], "back": record["picture"]} for record in records
    ]
    server = steadytrain.begin("serve", address, "--port", "0", sets=())
    try:
        url = server.stdout.readline().split()[0]
        found, other = (answers(url, each[:50]) for each in (records, turned))
    finally:
        server.terminate()
        server.communicate()
    assert [row["prediction"] for row in found] == [row["prediction"] for row in expected[:50]]
    for one, same in zip(found, expected, strict=False):
        chances = {name: one[name] for name in one if name != "prediction"}
        assert chances == pytest.approx({name: same[name] for name in chances}, rel=1e-4)
    assert found != other, "each column has a place of its own"


def answers(url, records):
    content = json.dumps({"records": records}).encode()
    request = Request(f"{url}/predict", content, {"content-type": "application/json"})
    with urlopen(request, timeout=300) as answer:
        return json.load(answer)["predictions"]

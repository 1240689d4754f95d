"""Images from folders to a registered model: killed, resumed, gated, and served elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from steadytrain.components.shared.records import EvaluationRecord, RegistrationRecord, TrainRecord
from steadytrain.components.shared.workspace import Workspace

from support.command import finish, kill_paused
from support.pictures import digits, write_folders
from support.without_steadytrain import PROGRAM as WITHOUT_STEADYTRAIN

SERVE = (
    WITHOUT_STEADYTRAIN
    + """import mlflow, numpy, pandas
from pathlib import Path
from PIL import Image

mlflow.set_tracking_uri(sys.argv[1])
model = mlflow.pyfunc.load_model(sys.argv[2])
paths = sorted(Path(sys.argv[3]).glob("*/*.png"))
kinds = {
    "bytes": [path.read_bytes() for path in paths],
    "paths": [str(path) for path in paths],
    "arrays": [numpy.asarray(Image.open(path)) for path in paths],
}
found = {
    name: model.predict(pandas.DataFrame({"image": images}))["prediction"].tolist()
    for name, images in kinds.items()
}
print(json.dumps({**found, "target": [path.parent.name for path in paths]}))
"""
)
SETTINGS = [
    "data.images.size=8",
    "data.test_share=0.2",
    "model.config={model_type: convnext, patch_size: 2, num_stages: 2, hidden_sizes: [32, 64], "
    "depths: [1, 1], layer_scale_init_value: 1.0}",
    "training.num_train_epochs=8",
    "training.learning_rate=4e-3",
    "training.global_batch_size=32",
    "training.image_augmentation={shift: 0.07}",
    "compute.threads_per_rank=1",
]


@pytest.mark.slow
def test_images_are_trained_killed_resumed_gated_registered_and_served(steadytrain, tmp_path):
    source = write_folders(tmp_path / "digits", *digits())
    broken = {"empty.png": b"", "text.jpg": b"no image", "cut.png": b"\x89PNG\r\n\x1a\n\0\0"}
    for name, content in broken.items():
        (source / "3" / name).write_bytes(content)
    fields = (f"data.source=[{source}]", *SETTINGS)
    pause, sets = steadytrain.pause(40), (*fields, "run=killed", "training.save_steps=20")
    killed = steadytrain.start("images", *sets, **pause.everywhere)
    workspace = Workspace(steadytrain.output, "killed")
    kill_paused(pause, killed)
    finish(killed, 900)
    # tests/unit/images/test_training.py compares the weights with those of an undisturbed run.
    assert TrainRecord.load(workspace.record("train")).attempts == 2
    evaluation = EvaluationRecord.load(workspace.record("evaluate"))
    assert evaluation.metrics["accuracy"].value > 0.9 > evaluation.baselines["accuracy"]
    registered = RegistrationRecord.load(workspace.record("promote"))
    assert registered.champion
    store = f"sqlite:///{steadytrain.output / 'mlflow.db'}"
    address = f"{registered.model_name}@champion"
    scored = steadytrain("predict", address, source, "--output", steadytrain.output)
    assert scored.code == 0, scored.err
    assert "3 not_predicted" in scored.err
    for name in broken:
        (source / "3" / name).unlink()
    done = subprocess.run(
        [sys.executable, "-c", SERVE, store, registered.model_uri, str(source)],
        env=steadytrain.environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["bytes"] == found["paths"] == found["arrays"]
    hits = [a == b for a, b in zip(found["bytes"], found["target"], strict=True)]
    assert sum(hits) / len(hits) > 0.95
    rows = {row["source"]: row["prediction"] for row in map(json.loads, scored.out.splitlines())}
    assert [rows[path] for path in sorted(rows)] == found["bytes"]


@pytest.mark.slow
def test_plan_writes_the_arguments_of_the_run(steadytrain, tmp_path):
    images, labels = (part[:200] for part in digits())
    source = write_folders(tmp_path / "digits", images, labels)
    more = ("training.num_train_epochs=1", "training.max_steps=2", "training.micro_batch_size=16")
    sets = (f"data.source=[{source}]", *SETTINGS, *more)
    done = steadytrain("plan", "images", "--gpu", "t4", "--write", tmp_path / "plan", sets=sets)
    assert done.code == 0, done.err
    (run,) = steadytrain.run("images", *sets).runs
    planned, of_run = (
        json.loads((folder / "training_args.json").read_text())
        for folder in (tmp_path / "plan", run / "transformers")
    )
    assert planned["arguments"] == of_run["arguments"]
    assert planned["reasons"]["per_device_train_batch_size"] == "set by you"
    script = "train_with_transformers.py"
    assert planned["script"] == of_run["script"] == script
    assert (tmp_path / "plan" / script).is_file()

"""A registered model predicts in an environment that has what it requires, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import mlflow
import pandas as pd
import pytest

from steadytrain.components.shared.records import RegistrationRecord
from steadytrain.components.shared.workspace import Workspace

from support.mixed import MIXED, write_mixed
from support.pictures import digits, write_folders
from support.series import FIRMS, firms
from support.tables import shipped, write_csv

pytestmark = pytest.mark.long
UV = Path(sys.executable).with_name("uv")
SERVE = """
import importlib.util, json, sys
import mlflow

assert importlib.util.find_spec("steadytrain") is None
model = mlflow.pyfunc.load_model(sys.argv[1])
print(model.predict(model.input_example).to_json(orient="records", double_precision=15))
"""
MEMBERS = [
    "{framework: sklearn, config: {model_type: linear}}",
    "{framework: sklearn, config: {model_type: extra_trees}, max_steps: 1}",
    "{framework: sklearn, config: {model_type: knn}}",
    "{framework: sklearn, config: {model_type: hist_boosting}, max_steps: 2}",
    "{framework: lightgbm, config: {model_type: lightgbm}, max_steps: 2}",
    "{framework: xgboost, config: {model_type: xgboost}, max_steps: 2}",
    "{framework: catboost, config: {model_type: catboost}, max_steps: 2}",
    "{framework: pytorch_tables, config: {model_type: tabm, width: 16}, max_steps: 2}",
]


def table(folder):
    return "tabular", [
        *(f"data.source=[{write_csv(folder, shipped('wine'))}]", "data.target=target"),
        *("model.framework=ensemble", f"training.max_steps={len(MEMBERS)}"),
        f"model.config={{model_type: ensemble, members: [{', '.join(MEMBERS)}]}}",
    ]


def series(folder):
    return "series", [
        *(f"data.source=[{write_csv(folder, firms())}]", *FIRMS),
        *("model.framework=ensemble", "training.max_steps=2"),
        "model.config={model_type: ensemble, members: ["
        "{framework: statsforecast, config: {model_type: auto_ets}}, "
        "{framework: mlforecast, config: {model_type: lightgbm}, max_steps: 5}]}",
    ]


def images(folder):
    return "images", [
        f"data.source=[{write_folders(folder / 'digits', *(one[:200] for one in digits()))}]",
        *("data.images.size=8", "data.test_share=0.2", "training.max_steps=4"),
        "model.config={model_type: convnext, patch_size: 2, num_stages: 1, hidden_sizes: [16], "
        "depths: [1]}",
    ]


def mixed(folder):
    return "multimodal", [
        f"data.source=[{write_mixed(folder / 'data', 200)}]",
        *(*MIXED, "training.max_steps=4"),
    ]


@pytest.mark.parametrize("kind", [table, series, images, mixed])
def test_model_predicts_where_only_its_requirements_are_installed(kind, steadytrain, tmp_path):
    preset, sets = kind(tmp_path)
    done = steadytrain.run(preset, *sets, "run=one", "gate.beat_baseline=false")
    assert done.code == 0, done.err
    record = RegistrationRecord.load(Workspace(steadytrain.output, "one").record("register"))
    mlflow.set_tracking_uri(f"sqlite:///{steadytrain.output / 'mlflow.db'}")
    folder = Path(
        mlflow.artifacts.download_artifacts(record.model_uri, dst_path=tmp_path / "model")
    )
    python = tmp_path / "environment" / "bin" / "python"
    subprocess.run([UV, "venv", "-q", "-p", sys.executable, python.parents[1]], check=True)
    install = [UV, "pip", "install", "-q", "-p", python, "-r", folder / "requirements.txt"]
    subprocess.run(install, check=True)
    fresh = subprocess.run(
        [python, "-c", SERVE, folder],
        env=steadytrain.environment(PYTHONPATH=""),
        capture_output=True,
        text=True,
        check=False,
    )
    assert fresh.returncode == 0, fresh.stderr
    model = mlflow.pyfunc.load_model(str(folder))
    expected = model.predict(model.input_example)
    found = pd.DataFrame(json.loads(fresh.stdout.splitlines()[-1]))
    assert len(found) > 0
    for name in expected.columns:
        own = expected[name].tolist()
        assert found[name].tolist() == (
            pytest.approx(own, rel=1e-9) if expected[name].dtype == float else [*map(str, own)]
        ), name

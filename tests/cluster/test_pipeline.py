"""The full DAG in its own images on a real cluster, under restricted Pod Security."""

from __future__ import annotations

import json
import uuid
from urllib.parse import urlencode

import pytest

from steadytrain.components.shared.config import load, to_parameters
from steadytrain.components.shared.config.operations import PipelineConfig
from steadytrain.pipelines.compile import compile_pipeline, read_pipeline
from steadytrain.pipelines.pod_names import MOUNT_PATH

from support.cluster import PodFailed
from support.command import TINY_LM
from support.furniture import away
from support.walker import Walker

STEPS = {"preprocess", "train", "evaluate", "register", "promote", "report"}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    path = compile_pipeline(tmp_path_factory.mktemp("compile") / "pipeline.yaml")
    return read_pipeline(path)


@pytest.fixture
def walker(cluster, mlflow, compiled):
    return Walker(cluster, *compiled, job=str(uuid.uuid4()))


def tiny(run, *sets):
    config = load("causal-lm", [*TINY_LM, f"output={MOUNT_PATH}", *sets])
    return to_parameters(config, run=run)


def test_dag_runs_in_its_images_and_ends_with_a_champion(walker, cluster, mlflow):
    # The tracking server restarts while the first step needs it.
    events = f"{MOUNT_PATH}/runs/whole/events/*.jsonl"
    waits = f"grep -q 'for the tracking server' {events}"
    with away(cluster, mlflow.partition(":")[0], waits, 20):
        walker.run(**tiny("whole"))
    assert cluster.shell("sh", "-c", f"{waits} && echo reported").strip() == "reported"
    assert walker.states.keys() >= STEPS
    assert set(walker.states.values()) == {"done"}
    query = urlencode({"name": "stdlib-lm", "alias": "champion"})
    answer = cluster.ask(mlflow, f"api/2.0/mlflow/registered-models/alias?{query}")
    assert answer["model_version"]["version"] == "1"
    promoted = json.loads(cluster.read(f"{MOUNT_PATH}/runs/whole/records/promote.json"))
    assert promoted["champion"]
    assert "stdlib-lm" in cluster.read(f"{MOUNT_PATH}/runs/whole/report.html")


def test_report_is_written_after_a_failed_step(walker, cluster):
    with pytest.raises(PodFailed, match="nothing-is-here"):
        walker.run(**tiny("failed", f"data.source=[{MOUNT_PATH}/nothing-is-here]"))
    assert walker.states["preprocess"] == "failed"
    assert walker.states["report"] == "done"
    assert "nothing-is-here" in cluster.read(f"{MOUNT_PATH}/runs/failed/report.html")


def test_cross_validation_dag_scores_every_fold_and_registers_nothing(cluster, tmp_path):
    path = compile_pipeline(tmp_path / "folds.yaml", pipeline="cross-validate")
    walker = Walker(cluster, *read_pipeline(path), job=str(uuid.uuid4()))
    walker.run(**tiny("folds", "cross_validation.folds=2", "name=validated"))
    assert set(walker.states.values()) == {"done"}
    found = json.loads(cluster.read(f"{MOUNT_PATH}/studies/folds/cross-validation.json"))
    (plain,) = found["configurations"]
    assert plain["values"]["loss"].keys() == {"0", "1"}
    assert "is cross-validated" in cluster.read(f"{MOUNT_PATH}/runs/folds/report.html")
    # No step of this pipeline trains here, so there are no records and no model.
    assert "records" not in cluster.shell("ls", f"{MOUNT_PATH}/runs/folds").split()


def test_tuning_dag_registers_the_best_of_its_trials(cluster, mlflow, tmp_path):
    path = compile_pipeline(
        tmp_path / "tune.yaml", pipeline="tune", shape=PipelineConfig(fuse=True)
    )
    walker = Walker(cluster, *read_pipeline(path), job=str(uuid.uuid4()))
    rates = "tune.space={training.learning_rate: {choices: [1e-3, 1e-2]}}"
    study = ("tune.budget.trials=2", "tune.pruner=none", "tune.seeds=1", "name=tuned")
    walker.run(**tiny("study", "training.learning_rate=1e-3", rates, *study))
    assert walker.states.keys() >= {"preprocess", "tune", "train-winner", "report"}
    assert set(walker.states.values()) == {"done"}
    (gate,) = cluster.shell("sh", "-c", f"ls {MOUNT_PATH}/runs/study-*/records/gate.json").split()
    assert json.loads(cluster.read(gate))["compared"] == 2
    assert "is tuned" in cluster.read(f"{MOUNT_PATH}/runs/study/report.html")
    query = urlencode({"name": "tuned", "alias": "champion"})
    answer = cluster.ask(mlflow, f"api/2.0/mlflow/registered-models/alias?{query}")
    assert answer["model_version"]["version"] == "1"

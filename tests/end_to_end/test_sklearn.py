"""scikit-learn, from another package, through every step; killed, resumed, gated and registered."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from steadytrain.components.shared.digest import file_digest
from steadytrain.components.shared.events.types import AttemptEnded, TrainingStep
from steadytrain.components.shared.records import (
    EvaluationRecord,
    GateRecord,
    RegistrationRecord,
    TrainRecord,
)
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.agent.processes import processes_of

from support.command import finish, kill_paused, paused_rank, wait_for
from support.data import write_jsonl
from support.fruits import FRUITS, SCIKIT_LEARN, fruity
from support.plugins import install_example
from support.training import events_of

STEPS = """
import sys
from steadytrain.components.shared.config import load
from steadytrain.pipelines.steps import run_step
file, *steps = sys.argv[1:]
for step in steps:
    run_step(step, load(file))
"""
SERVE = """
import json, sys
import mlflow
from steadytrain.components.shared.config import load
from steadytrain.components.shared.tracking import use_tracking
from steadytrain.components.shared.workspace import Workspace
config = load(sys.argv[1])
use_tracking(config, Workspace.of(config))
served = mlflow.pyfunc.load_model(sys.argv[2])
labels = served.predict([f"{fruit} {fruit} {fruit}" for fruit in sys.argv[3:]])
runs = mlflow.search_runs(search_all_experiments=True, output_format="list")
histories = [mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss") for run in runs]
print(json.dumps({"labels": list(labels), "losses": max(map(len, histories))}))
"""


@pytest.fixture
def start(steadytrain, tmp_path):
    """Return a function that starts a program where the package is installed."""
    site = str(install_example(tmp_path / "example"))

    def started(program, *arguments, pause=None):
        variables = pause.everywhere if pause else {}
        variables["PYTHONPATH"] = ":".join([site, *filter(None, [variables.get("PYTHONPATH")])])
        return subprocess.Popen(
            [sys.executable, "-c", program, *map(str, arguments)],
            env=steadytrain.environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return started


@pytest.fixture
def configure(steadytrain, tmp_path):
    """Return a function that writes the configuration of a run."""
    source = write_jsonl(tmp_path / "fruits.jsonl", map(fruity, range(400)))

    def configured(run, **training):
        content = json.loads(json.dumps(SCIKIT_LEARN))
        content |= {"run": run, "output": str(steadytrain.output)}
        content["data"]["source"] = [str(source)]
        content["training"] |= training
        file = tmp_path / f"{run}.yaml"
        file.write_text(json.dumps(content))
        return file

    return configured


@pytest.mark.long
def test_sklearn_run_is_killed_resumed_gated_registered_and_loaded(start, configure, steadytrain):
    quiet, killed = configure("quiet"), configure("killed")
    undisturbed = start(STEPS, quiet, "preprocess", "train")

    # The rank is killed, and the supervisor tries again. Then the supervisor is killed, too.
    workspace = Workspace(steadytrain.output, "killed")
    pause = steadytrain.pause(1)
    program = start(STEPS, killed, "preprocess", "train", pause=pause)
    kill_paused(pause, program, then=30)
    paused_rank(pause, program)
    assert {event.attempt for event in events_of(workspace, TrainingStep)} == {1, 2}
    program.kill()
    program.communicate()
    wait_for(lambda: not processes_of(workspace.attempts))
    first = events_of(workspace, AttemptEnded)[0]
    assert (first.outcome, first.failure_class) == ("failed", "host_oom")
    finish(undisturbed)
    finish(start(STEPS, killed, "train", "evaluate", "register", "promote", "report"))

    runs = {name: steadytrain.output / "runs" / name for name in ("quiet", "killed", "other")}
    records = [TrainRecord.load(runs[name] / "records/train.json") for name in ("quiet", "killed")]
    assert [record.attempts for record in records] == [1, 3]
    files = [file_digest(runs[name] / "model/model.safetensors") for name in ("quiet", "killed")]
    assert files[0] == files[1], "the coefficients are equal to the bit"
    assert records[0].weights_digest == records[1].weights_digest

    evaluation = EvaluationRecord.load(runs["killed"] / "records/evaluate.json")
    assert evaluation.metrics["accuracy"].value > evaluation.baselines["accuracy"]
    assert set(evaluation.metrics) >= {"loss", "macro_f1", "auroc", "ece", "bits_per_token"}
    registered = RegistrationRecord.load(runs["killed"] / "records/promote.json")
    assert registered.champion
    page = (runs["killed"] / "report.html").read_text()
    assert "the new champion" in page
    assert "host_oom" in page

    # MLflow serves the registered version, and has the curve of the training.
    served = json.loads(finish(start(SERVE, killed, registered.model_uri, *FRUITS.values())))
    assert served["labels"] == list(FRUITS)
    assert served["losses"] > 10

    # The gate loads the champion to compare another model with it.
    finish(start(STEPS, configure("other", max_steps=1), "preprocess", "train", "evaluate"))
    gate = GateRecord.load(runs["other"] / "records/gate.json")
    assert gate.champion == evaluation.metrics["accuracy"].value
    assert not gate.promoted
    assert gate.improvement is not None

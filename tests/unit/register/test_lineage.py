"""From a model back to its data and code, and from data forward to its models."""

from __future__ import annotations

import json
import platform
import subprocess
from importlib.metadata import version

import pytest
from typer.testing import CliRunner

from steadytrain.components.evaluate.step import run as evaluate
from steadytrain.components.register.lineage import LineageStore
from steadytrain.components.register.step import promote
from steadytrain.components.register.step import run as register
from steadytrain.components.shared import environment as origin_module
from steadytrain.components.shared.environment import COMMIT, DIFF, code_origin, environment
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.tracking import finish_run
from steadytrain.components.shared.tracking.connect import open_tracking
from steadytrain.components.shared.workspace import Workspace
from steadytrain.pipelines.cli import app

from support.written_run import Writer


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with a commit and a change after it, as the current folder."""
    folder = tmp_path / "repository"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "task.py").write_text("one\n")
    user = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
    for command in (["init", "-q"], ["add", "."], [*user, "commit", "-qm", "first"]):
        subprocess.run(["git", *command], check=True)
    origin_module.code_origin.cache_clear()
    yield folder
    origin_module.code_origin.cache_clear()


def finished(trained, run, skill):
    """Evaluate, register and promote a run, and end it in MLflow."""
    config = trained(run, skill)
    workspace = Workspace.of(config)
    written = Writer(config)
    written.attempt(1, last=200, max_steps=500, outcome="failed", failure_class="gpu_oom")
    written.attempt(2, first=200, last=350, max_steps=500)
    evaluate(config)
    register(config)
    promote(config)
    assert finish_run(config, workspace, ok=True)
    return config


def models(config):
    """Return the id of each model that MLflow has of a checkpoint."""
    tracking = open_tracking(config, Workspace.of(config))
    found = tracking.client.search_logged_models([tracking.experiment_id])
    return {item.model_id for item in found if item.model_type == "checkpoint"}


@pytest.mark.slow
def test_a_model_leads_to_its_data_and_code_and_the_data_to_its_models(
    trained, repository, tmp_path
):
    (repository / "task.py").write_text("two\n")
    first = finished(trained, "first", 0.6)
    second = finished(trained, "second", 0.95)
    made = models(second)
    assert finish_run(second, Workspace.of(second), ok=True)
    assert models(second) == made
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    store = LineageStore(tmp_path / "output")
    model = store.of_model("shapes", "champion")
    assert (model.version, model.made_from["run"], model.made_from["data"]) == (
        "2",
        "second",
        "prepared",
    )
    assert (model.origin[COMMIT], len(model.origin[DIFF])) == (commit, 64)
    assert (model.made_from["gate"], model.made_from["compared_with"]) == ("promoted", "1")
    assert model.sources == ["shapes"]
    assert model.environment == {"python": "3.11.2"}
    assert (model.plan["world_size"], model.plan["strategy"]) == (2, "ddp")
    assert model.attempts == 2
    assert model.checkpoints == (
        "attempt-1-step-100",
        "attempt-1-step-200",
        "attempt-2-step-300",
    )
    tracking = open_tracking(second, Workspace.of(second))
    logged = {
        item.name: {metric.key: metric.value for metric in item.metrics}
        for item in tracking.client.search_logged_models([tracking.experiment_id])
        if item.model_type == "checkpoint"
    }
    assert logged["attempt-1-step-200"]["eval_loss"] > 0
    run = tracking.client.get_run(model.mlflow_run)
    (used,) = run.inputs.dataset_inputs
    assert json.loads(used.dataset.profile)["card"] == "data/card.json"
    assert run.data.tags[COMMIT] == commit

    assert [item.made_from["run"] for item in store.trained_on("prepared")] == ["first", "second"]
    output = ["--output", str(tmp_path / "output")]
    told = CliRunner().invoke(app, ["lineage", "shapes@champion", *output])
    assert told.exit_code == 0, told.output
    assert "data: prepared" in told.output
    assert "environment: python 3.11.2" in told.output
    assert "plan: world_size 2" in told.output
    assert commit in told.output
    told = CliRunner().invoke(app, ["lineage", "prepared", *output, "--json"])
    assert [item["version"] for item in json.loads(told.output)["models"]] == ["1", "2"]
    with pytest.raises(BadInput, match="shapes@missing"):
        store.of_model("shapes", "missing")
    with pytest.raises(BadInput, match="no model that was trained on data other"):
        store.trained_on("other")
    assert first.model_name == second.model_name


def test_environment_names_what_is_installed(monkeypatch):
    found = environment()
    assert found["python"] == platform.python_version()
    assert found["torch"] == version("torch")
    environment.cache_clear()
    monkeypatch.setattr("sys.path", [])
    assert set(environment()) == {"python", "system"}
    environment.cache_clear()


def test_origin_is_the_commit_and_what_differs_from_it(repository):
    clean = code_origin()
    assert DIFF not in clean
    assert len(clean[COMMIT]) == 40
    (repository / "task.py").write_text("two\n")
    code_origin.cache_clear()
    assert code_origin()[COMMIT] == clean[COMMIT]
    assert len(code_origin()[DIFF]) == 64


def test_folder_without_a_repository_has_no_commit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    code_origin.cache_clear()
    assert COMMIT not in code_origin()
    code_origin.cache_clear()


def test_output_without_a_store_is_an_error(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(BadInput, match="no run has been tracked"):
        LineageStore(tmp_path)

"""What the user sees at the end of a run."""

from __future__ import annotations

import shlex

import pytest

from steadytrain.components.shared.events.types import StepFailed
from steadytrain.components.shared.records import GateRecord, RegistrationRecord
from steadytrain.components.shared.registry import decided_about
from steadytrain.pipelines.local import LocalRun
from steadytrain.pipelines.outline import ending, stopping


@pytest.fixture
def ended(make_run, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    def end(**sections):
        run = make_run(**sections)
        workspace = run.workspace
        workspace.config.write_text(run.config.to_yaml())
        RegistrationRecord(
            model_name="tiny", version="7", model_uri="models:/tiny/7", champion=True, reason="best"
        ).save(workspace.record("register"))
        GateRecord(
            subject=decided_about(run.config, "w"), promoted=True, reason="best", metric="loss",
            greater_is_better=False, candidate=1.0, margin=0.0,
        ).save(workspace.record("gate"))  # fmt: skip
        lines = ending(LocalRun(workspace, succeeded=True, stopped=None, failure=None))
        (line,) = (line for line in lines if line.startswith("mlflow"))
        return line, workspace

    return end


def test_tracking_page_of_a_server_is_shown(ended):
    line, _ = ended(tracking={"uri": "http://tracking:5000/"})
    assert line == "mlflow  http://tracking:5000/#/models/tiny/versions/7"


def test_server_from_the_environment_is_shown_without_password(ended, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:secret@tracking/mlflow")
    line, _ = ended()
    assert line == "mlflow  https://tracking/mlflow/#/models/tiny/versions/7"


def test_database_address_is_shown_without_password(ended, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql://me:secret@database/mlflow")
    line, _ = ended()
    assert line == "mlflow  mlflow ui --backend-store-uri postgresql://database/mlflow"


def test_local_store_comes_with_the_command_that_serves_it(ended, tmp_path):
    line, _ = ended(output=tmp_path / "a b?c")
    address = f"sqlite+pysqlite:///{tmp_path}/a b%3Fc/mlflow.db"
    assert line == f"mlflow  mlflow ui --backend-store-uri {shlex.quote(address)}"


@pytest.mark.parametrize("there", [True, False])
def test_log_of_a_failed_run_is_named_if_it_is_there(make_run, there):
    failed = LocalRun(
        make_run().workspace,
        succeeded=False,
        stopped=None,
        failure=StepFailed(stage="train", error="E", message="m", remedy="r"),
    )
    failed.log.parent.mkdir(parents=True, exist_ok=True)
    if there:
        failed.log.touch()
    assert (f"log     {failed.log}" in ending(failed)) == there


def test_stopped_run_says_what_is_saved_and_how_to_continue(make_run, tmp_path):
    run = make_run(output=tmp_path / "a b")
    run.finish("preprocess", 1.0)
    run.workspace.config.write_text(run.config.to_yaml())
    again = f"next    steadytrain resume tiny --output '{tmp_path}/a b'"
    assert stopping(run.workspace) == ["stopped", "saved   nothing yet", again]
    run.preprocess()
    assert stopping(run.workspace)[1] == "saved   the results of preprocess"
    run.start_step("train")
    run.attempt(1, last=170, max_steps=1400, outcome="stopped")
    assert stopping(run.workspace) == [
        "stopped",
        "saved   the checkpoint of step 100 of 1,400",
        again,
    ]


def test_run_stopped_before_a_checkpoint_can_only_start_again(make_run):
    run = make_run()
    run.workspace.config.unlink(missing_ok=True)
    (line,) = stopping(run.workspace)
    assert "the same command starts it again" in line

"""A command that is rejected because another process has the run does not change that run."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from steadytrain.components.preprocess.step import kfp_preprocess
from steadytrain.components.shared.config import to_parameters
from steadytrain.components.shared.errors import RunBusy
from steadytrain.components.train import step
from steadytrain.components.train.recovery.takeover import hold_run
from steadytrain.pipelines import runs
from steadytrain.pipelines.cli import app
from steadytrain.pipelines.runs import run_lock
from steadytrain.pipelines.steps import run_step

from support.holding import holding

STEPS = ("preprocess", "train", "evaluate", "register", "promote", "report")
TRAIN = """
import sys
from pathlib import Path
from steadytrain.components.shared.config import load
from steadytrain.components.train.recovery.takeover import hold_run
with hold_run(load(Path(sys.argv[1]))):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def trained(make_run):
    """A run that another process trains without this machine's lock, as a pod does."""
    run = make_run()
    with holding(TRAIN, run.workspace.config):
        yield run


def files(run):
    """Return the files in the run's folder, except its report and temporary probe files."""
    folder = run.workspace.folder
    return {
        path.relative_to(folder): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path != run.workspace.report and "lease" not in path.parts
    }


@pytest.mark.parametrize("name", STEPS)
def test_step_beside_a_running_command_is_rejected(make_run, name):
    run = make_run()
    before = files(run)
    with run_lock(run.workspace), pytest.raises(RunBusy):
        run_step(name, run.config)
    assert files(run) == before


def test_second_train_step_is_rejected(trained):
    before = files(trained)
    with pytest.raises(RunBusy):
        step.run_stage(trained.config)
    assert files(trained) == before
    assert runs.state_of(trained.workspace).state == "running"


def test_second_submitted_pipeline_is_rejected(trained):
    before = files(trained)
    parameters = to_parameters(trained.config, run=trained.config.run_id)
    with pytest.raises(RunBusy):
        kfp_preprocess(
            **{**parameters, "overrides": {}, "job": "1"},
            resolved=None, data=None, data_card=None, counts=None,
        )  # fmt: skip
    assert files(trained) == before


@pytest.mark.parametrize("locked", [True, False])
def test_report_of_a_running_run_only_writes_a_page(trained, make_run, locked):
    run = make_run("local") if locked else trained
    before = files(run)
    arguments = ["report", run.config.run_id, "--output", str(run.workspace.output)]
    if locked:
        with run_lock(run.workspace):
            done = CliRunner().invoke(app, arguments)
    else:
        done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert files(run) == before
    assert run.workspace.report.is_file()


def test_takeover_is_reported_by_the_new_supervisor(make_run, monkeypatch):
    """The process that lost the run does not report its end."""
    run = make_run()

    def refused(*_, **__):
        raise RunBusy("this run was taken over")

    told = run.workspace.events / "train.jsonl"
    monkeypatch.setattr(step, "load_trainer", refused)
    with hold_run(run.config), pytest.raises(RunBusy):
        step.run_stage(run.config)
    assert "step_failed" not in told.read_text()

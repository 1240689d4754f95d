"""The code for other orchestrators calls commands that there are, in an order that works."""

from __future__ import annotations

import re
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from steadytrain.pipelines.cli import app

from support.snippets import ROOT, blocks

PAGE = ROOT / "docs" / "guides" / "orchestrators.md"
AIRFLOW, PREFECT = (block.text for block in blocks("py") if block.page == PAGE)


def test_lint_that_the_page_names_is_there():
    (line,) = (block.text for block in blocks("sh") if block.page == PAGE)
    words = line.split()[2:]
    group = typer.main.get_command(app)
    assert group.commands["compile"].make_context("compile", words).params["check"] == "vertex"


class Operator:
    """Airflow's BashOperator, as far as the DAG uses it: Airflow is not installed here."""

    made: list[Operator] = []  # noqa: RUF012  cleared by each test

    def __init__(self, **settings):
        self.settings, self.after = settings, []
        Operator.made.append(self)

    def __rshift__(self, other):
        other.after.append(self)


def test_airflow_runs_the_steps_one_after_the_other(monkeypatch):
    class Dag:
        def __init__(self, *_, **__):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    Operator.made.clear()
    for name, content in {
        "airflow": {},
        "airflow.providers": {},
        "airflow.providers.standard": {},
        "airflow.providers.standard.operators": {},
        "airflow.providers.standard.operators.bash": {"BashOperator": Operator},
        "airflow.sdk": {"DAG": Dag},
    }.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    exec(compile(AIRFLOW, "airflow", "exec"), {})
    group = typer.main.get_command(app)
    names = []
    for before, task in zip([None, *Operator.made], Operator.made, strict=False):
        program, command, *rest = task.settings["bash_command"].split()
        rest = re.sub(r"\{\{ (\w+) \}\}", r"\1", " ".join(rest)).split()
        parsed = group.commands[command].make_context(command, rest)
        assert (program, parsed.params["name"]) == ("steadytrain", task.settings["task_id"])
        assert parsed.params["run"] == "ds_nodash"
        assert task.after == ([before] if before else [])
        names.append(parsed.params["name"])
    assert names == ["preprocess", "train", "evaluate", "register", "promote", "report"]


@pytest.mark.slow
def test_prefect_trains_and_reports(monkeypatch, tmp_path):
    """The steps run for real; only Prefect's decorators are replaced, which is not installed."""
    same = SimpleNamespace(
        flow=lambda function: function, task=lambda **_: lambda function: function
    )
    monkeypatch.setitem(sys.modules, "prefect", same)
    rows = "\n".join(f"{n},{n % 7},{'yes' if n % 7 > 3 else 'no'}" for n in range(200))
    (tmp_path / "table.csv").write_text(f"a,b,target\n{rows}\n")
    (tmp_path / "my.yaml").write_text(
        "name: t\ndata: {task: tabular_classification, source: [table.csv], target: target,"
        " test_share: 0.2, validation_share: 0.1}\n"
        "model: {framework: sklearn, config: {model_type: linear}}\n"
        "training: {max_steps: 1}\n"
    )
    monkeypatch.chdir(tmp_path)
    called = []

    def ours(command, *, check):
        assert (command[0], check) == ("steadytrain", True)
        called.append(command[2])
        done = CliRunner().invoke(app, command[1:])
        if done.exit_code:
            raise subprocess.CalledProcessError(done.exit_code, command)

    content = {}
    with monkeypatch.context() as patch:
        # The steps, which run in this process, start programs of their own.
        patch.setitem(sys.modules, "subprocess", SimpleNamespace(run=ours))
        exec(compile(PREFECT, "prefect", "exec"), content)
    content["train"]("mine")
    assert called == ["preprocess", "train", "evaluate", "register", "promote", "report"]
    assert (tmp_path / "out" / "runs" / "mine" / "report.html").is_file()
    (tmp_path / "my.yaml").write_text("name: t\n")
    with pytest.raises(subprocess.CalledProcessError):
        content["train"]("other")
    assert called[6:] == ["preprocess", "report"]

"""A broken plugin of any kind is found before a run starts."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from steadytrain.components.shared import plugins
from steadytrain.components.shared.config import load
from steadytrain.components.shared.errors import BadInput, ConfigError
from steadytrain.pipelines import early_checks
from steadytrain.pipelines.cli import app
from steadytrain.pipelines.early_checks import check_plugins

from support.plugins import write_plugin

USED = {
    plugins.TASKS: ("data.task", "data.task={}"),
    plugins.TRAINERS: ("model.framework", "model.framework={}"),
    plugins.ORDERS: ("training.order", "training.order={}"),
    plugins.SINKS: ("tracking.sinks", "tracking.sinks=[{}]"),
    plugins.METRICS: ("evaluation", "name=any"),
}
BROKEN = {
    "exits": ("import sys; sys.exit(0)", "cannot be imported from {}_package 2.0: SystemExit: 0"),
    "lacks": ("import no_such_module", "No module named 'no_such_module'"),
    "empty": ("", "cannot be imported from {}_package 2.0: AttributeError"),
    "number": ("Plugin = 5", "5"),
}


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("group", USED)
def test_it_is_named(tmp_path, monkeypatch, group, kind):
    name = f"{kind}_{group.partition('.')[2]}"
    text, message = BROKEN[kind]
    monkeypatch.syspath_prepend(write_plugin(tmp_path, group, name, text))
    field, setting = USED[group]
    config = load("causal-lm", [setting.format(name)])

    with pytest.raises(ConfigError) as caught:
        check_plugins(config)

    (problem,) = caught.value.problems
    assert (problem.field, problem.value) == (field, repr(name))
    assert message.format(name) in problem.message
    assert problem.remedy


def test_missing_method_of_a_metric_is_named(tmp_path, monkeypatch):
    text = "class Plugin:\n    greater_is_better = True\n    value = resampled = lambda *_: None\n"
    half = text.replace(" = resampled", "")
    monkeypatch.syspath_prepend(write_plugin(tmp_path, plugins.METRICS, "whole", text))
    check_plugins(load("causal-lm"))
    monkeypatch.syspath_prepend(write_plugin(tmp_path / "other", plugins.METRICS, "half", half))
    with pytest.raises(ConfigError, match="not an object of Metric: it has no resampled"):
        check_plugins(load("causal-lm"))


def test_every_broken_plugin_is_reported_at_once(tmp_path, monkeypatch):
    for group, name in ((plugins.ORDERS, "shuffler"), (plugins.SINKS, "drain")):
        monkeypatch.syspath_prepend(write_plugin(tmp_path / name, group, name, "1 / 0"))
    config = load("causal-lm", ["training.order=shuffler", "tracking.sinks=[drain, mlflow]"])
    with pytest.raises(ConfigError) as caught:
        check_plugins(config)
    assert [item.field for item in caught.value.problems] == ["training.order", "tracking.sinks"]


def test_task_file_that_exits_is_named(tmp_path, monkeypatch):
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    config = load("causal-lm", ["data.task=leaves:TASK"])
    with pytest.raises(ConfigError, match=r"data.task = 'leaves:TASK' cannot be used: SystemExit"):
        check_plugins(config)


def test_machine_without_torch_leaves_plugins_to_the_images(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(write_plugin(tmp_path, plugins.ORDERS, "heavy", "import torchless"))
    monkeypatch.setattr(early_checks.importlib.util, "find_spec", lambda name: None)
    check_plugins(load("causal-lm", ["training.order=heavy"]))


@pytest.mark.parametrize("command", ["validate", "run", "plan"])
def test_commands_check_before_they_start(tmp_path, monkeypatch, command):
    name = f"early_{command}"
    monkeypatch.syspath_prepend(write_plugin(tmp_path, plugins.ORDERS, name, "1 / 0"))
    output = tmp_path / "output"
    arguments = [command, "causal-lm", "--set", f"training.order={name}", "-o", str(output)]
    ended = CliRunner().invoke(app, arguments)
    assert isinstance(ended.exception, ConfigError)
    assert name in str(ended.exception)
    assert not output.exists()


@pytest.mark.parametrize("setting", ["training.masking.probability=0.3", "training.dpo.beta=0.2"])
def test_commands_reject_what_the_task_does_not_learn(tmp_path, setting):
    output = tmp_path / "output"
    arguments = ["validate", "causal-lm", "--set", setting, "-o", str(output)]
    ended = CliRunner().invoke(app, arguments)
    assert isinstance(ended.exception, ConfigError)
    assert "the loss of data.task causal_lm does not include it" in str(ended.exception)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ("[]", "model.config.members has no member"),
        ("[{framework: sklearn}]", "model.config.members: 0.config"),
        ("[{framework: sklearn, config: {model_type: linear}}]", "training.max_steps = 2: each"),
    ],
)
def test_ensemble_of_other_members_is_refused_before_its_data_are_read(members, message):
    model = f"model.config={{model_type: ensemble, members: {members}}}"
    config = load("vote", ["model.framework=ensemble", model, "training.max_steps=2"])
    with pytest.raises(BadInput, match=re.escape(message)):
        check_plugins(config)

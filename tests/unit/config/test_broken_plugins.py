"""A broken plugin is bad input that names the plugin and its package, never a defect of ours."""

from __future__ import annotations

import signal

import pytest

from steadytrain.components.shared import plugins
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.train.recovery.takeover import plugin_code

from support.plugins import write_plugin

MINIMAL = {"name": "any", "data": {"source": ["any"]}, "model": {"base": "hub:x"}}
USED = {
    "steadytrain.schedules": lambda name: {"training": {"lr_scheduler_type": name}},
    "steadytrain.strategies": lambda name: {"compute": {"strategy": name}},
    "steadytrain.optimizers": lambda name: {"training": {"optim": name}},
    "steadytrain.training_components": lambda name: {"training": {"components": {name: {}}}},
}


@pytest.mark.parametrize(
    "text",
    [
        "import sys; sys.exit(0)",
        "1 / 0",
        "Plugin = 5",
        "class Odd(BaseException): pass\nraise Odd('x')",
        "raise KeyboardInterrupt",
    ],
)
@pytest.mark.parametrize("group", USED)
def test_broken_plugin_is_reported(tmp_path, monkeypatch, group, text):
    # As under the command, which takes the signals itself.
    monkeypatch.setattr(signal, "getsignal", lambda _: lambda *_: None)
    # Specs are cached by name, so each case has its own.
    name = f"broken{abs(hash((group, text)))}"
    monkeypatch.syspath_prepend(str(write_plugin(tmp_path, group, name, text)))
    with pytest.raises(BadInput, match=name) as raised:
        from_mapping({**MINIMAL, **USED[group](name)})
    assert "uninstall" in raised.value.remedy + raised.value.message


def test_changed_code_makes_another_run(tmp_path, monkeypatch):
    text = "from steadytrain.components.shared.config.schedules import ScheduleSpec\n"
    text += "Plugin = ScheduleSpec(lambda step, settings: 1.0)\n"
    monkeypatch.syspath_prepend(str(write_plugin(tmp_path, "steadytrain.schedules", "mine", text)))
    config = from_mapping({**MINIMAL, "training": {"lr_scheduler_type": "mine"}})
    before = plugin_code(config)
    assert "mine_package 2.0" in before["training.lr_scheduler_type"]
    (tmp_path / "mine_package.py").write_text(text.replace("1.0", "0.5"))
    assert plugin_code(config) != before
    assert plugin_code(from_mapping(MINIMAL)) == {}


def test_interrupt_of_the_user_is_passed_on(tmp_path, monkeypatch):
    folder = write_plugin(tmp_path, "steadytrain.tasks", "interrupted", "raise KeyboardInterrupt")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        plugins.load("steadytrain.tasks", "interrupted")


def renamed(folder, name):
    """Give the package in a folder other metadata."""
    (metadata,) = folder.glob("*.dist-info/METADATA")
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9\n")


@pytest.mark.parametrize("name", ["steadytrain ", "Steady-Train", "SteadyTrain", "steadytrain"])
def test_package_that_claims_our_name_is_not_ours(tmp_path, monkeypatch, name):
    folder = write_plugin(tmp_path, "steadytrain.tasks", "claimed", "Plugin = 5")
    renamed(folder, name)
    monkeypatch.syspath_prepend(str(folder))
    assert not plugins.is_ours("steadytrain.tasks", "claimed")
    assert "claimed" in plugins.others("steadytrain.tasks")
    assert plugins.is_ours("steadytrain.tasks", "causal_lm")


def test_escape_codes_of_a_package_reach_no_terminal(tmp_path, monkeypatch):
    folder = write_plugin(tmp_path, "steadytrain.tasks", "colored", "raise ValueError('\\x1b[31m')")
    renamed(folder, "red\x1b[31m\x9b2Jpackage")
    monkeypatch.syspath_prepend(str(folder))
    with pytest.raises(BadInput, match="red") as caught:
        plugins.load("steadytrain.tasks", "colored")
    assert not any(sign in str(caught.value) for sign in "\x1b\x9b")
    assert all(line.isprintable() for line in plugins.added("steadytrain.tasks"))

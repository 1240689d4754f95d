"""A broken plugin is bad input that names the plugin and its package, never a defect of ours."""

from __future__ import annotations

import pytest

from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.train.recovery.settings import plugin_code

from support.plugins import write_plugin

MINIMAL = {"name": "any", "data": {"source": ["any"]}, "model": {"base": "hub:x"}}
USED = {
    "steadytrain.schedules": lambda name: {"training": {"lr_scheduler_type": name}},
    "steadytrain.strategies": lambda name: {"compute": {"strategy": name}},
    "steadytrain.optimizers": lambda name: {"training": {"optim": name}},
    "steadytrain.training_components": lambda name: {"training": {"components": {name: {}}}},
}


@pytest.mark.parametrize("text", ["import sys; sys.exit(0)", "1 / 0", "Plugin = 5"])
@pytest.mark.parametrize("group", USED)
def test_broken_plugin_is_reported(tmp_path, monkeypatch, group, text):
    # Specs are cached by name, so each case has its own.
    name = f"broken{abs(hash((group, text)))}"
    monkeypatch.syspath_prepend(str(write_plugin(tmp_path, group, name, text)))
    with pytest.raises(BadInput, match=name) as raised:
        from_mapping({**MINIMAL, **USED[group](name)})
    assert "uninstall" in raised.value.remedy + raised.value.message


def test_changed_code_makes_another_run(tmp_path, monkeypatch):
    text = "from steadytrain.components.shared.config.schedules import ScheduleSpec\n"
    text += "Plugin = ScheduleSpec(lambda step, course: 1.0)\n"
    monkeypatch.syspath_prepend(str(write_plugin(tmp_path, "steadytrain.schedules", "mine", text)))
    config = from_mapping({**MINIMAL, "training": {"lr_scheduler_type": "mine"}})
    before = plugin_code(config)
    assert "mine_package 2.0" in before["training.lr_scheduler_type"]
    (tmp_path / "mine_package.py").write_text(text.replace("1.0", "0.5"))
    assert plugin_code(config) != before
    assert plugin_code(from_mapping(MINIMAL)) == {}

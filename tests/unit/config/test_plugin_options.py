"""Options of optimizers and schedules: checked by the spec, and part of the identity if set."""

from __future__ import annotations

import pytest

from steadytrain.components.shared import plugins
from steadytrain.components.shared.config import from_mapping, load
from steadytrain.components.shared.config.schedules import ScheduleSettings, schedule_spec
from steadytrain.components.shared.effects import Use
from steadytrain.components.shared.errors import ConfigError

from support.plugins import SOURCE, write_plugin

MINIMAL = {"name": "any", "data": {"source": ["any"]}, "model": {"base": "hub:x"}}
OPTIMIZER = """
from steadytrain.components.shared.config.optimizers import OptimizerSpec

def options(*, momentum=0.9):
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum = {momentum}: give a share below 1")

Plugin = OptimizerSpec(build=None, options=options)
"""


@pytest.fixture
def configured(tmp_path, monkeypatch):
    schedule = (SOURCE / "steadytrain_example" / "schedules.py").read_text()
    schedule += "Plugin = TRAPEZOID\n"
    for group, name, text in (
        (plugins.OPTIMIZERS, "heavy_ball", OPTIMIZER),
        (plugins.SCHEDULES, "stable_decay", schedule),
    ):
        monkeypatch.syspath_prepend(write_plugin(tmp_path / name, group, name, text))

    def make(**training):
        named = {"optim": "heavy_ball", "lr_scheduler_type": "stable_decay", **training}
        return from_mapping({**MINIMAL, "training": named})

    return make


@pytest.mark.parametrize(
    ("field", "options", "message"),
    [
        ("optim_args", {"momentum": 2}, "momentum = 2: give a share below 1"),
        ("optim_args", {"nesterov": True}, "unexpected keyword argument 'nesterov'"),
        ("lr_scheduler_kwargs", {"decay": 0}, "decay = 0: give a share above 0"),
        ("lr_scheduler_kwargs", {"power": 2}, "unexpected keyword argument 'power'"),
    ],
)
def test_what_the_spec_rejects_is_rejected_with_its_signature(configured, field, options, message):
    with pytest.raises(ConfigError) as caught:
        configured(**{field: options})
    (problem,) = caught.value.problems
    assert problem.field == f"training.{field}"
    assert message in problem.message
    assert "its options are (" in problem.remedy


@pytest.mark.parametrize("field", ["optim_args", "lr_scheduler_kwargs"])
def test_built_in_ones_have_none(field):
    with pytest.raises(ConfigError, match=f"training.{field} = .*has no options, such as x"):
        from_mapping({**MINIMAL, "training": {field: {"x": 1}}})


def test_options_reach_the_schedule(configured):
    config = configured(lr_scheduler_kwargs={"decay": 0.5})
    spec = schedule_spec("stable_decay")
    options = spec.options(**config.training.lr_scheduler_kwargs)
    assert spec.factor(75, ScheduleSettings(steps=100, warmup=0, peak=1.0, options=options)) == 0.5


def test_options_are_part_of_the_identity_only_if_they_are_set(configured):
    plain, set_ = configured(), configured(optim_args={"momentum": 0.5})
    assert plain.digest() == configured(optim_args={}).digest() != set_.digest()
    assert "optim_args" not in plain.counted(Use.TRAINING)["training"]
    assert load(set_.to_yaml()) == set_

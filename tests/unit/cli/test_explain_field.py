"""`validate --explain FIELD`: what a field is, its value and origin, and what it affects."""

from __future__ import annotations

import json
import re

import pytest

from steadytrain.components.shared.config import RunConfig, load
from steadytrain.components.shared.config.fields import leaves
from steadytrain.components.shared.errors import BadInput
from steadytrain.pipelines.config_help import explained
from steadytrain.pipelines.sources import open_source

from support.odd import call


@pytest.fixture(scope="module")
def chosen():
    return open_source("chat", ["training.seed=7", ("run", "mine"), "data.columns.text=body"])


def test_every_field_can_be_explained(chosen):
    for field in leaves(RunConfig):
        told = explained(field.name, chosen)
        assert told.affects, field.name
        assert told.lines()[0] == field.name


def test_every_section_can_be_explained_with_its_fields(chosen):
    told = explained("model", chosen)
    assert [item.field.name for item in told.inner] == [
        f"model.{name}" for name in type(chosen.config.model).model_fields
    ]
    assert any(line.strip() == 'model.framework = "pytorch" (default)' for line in told.lines())


@pytest.mark.parametrize(
    ("field", "value", "origin"),
    [
        ("training.seed", 7, "--set"),
        ("run", "mine", "command line"),
        ("training.global_batch_size", 32, "preset chat"),
        ("training.optim", "adamw_torch", "default"),
        ("data.columns.text", "body", "--set"),
        ("data.columns.label", "label", "default"),
    ],
)
def test_value_comes_with_its_origin(chosen, field, value, origin):
    told = explained(field, chosen)
    assert (told.value, told.origin) == (value, origin)


def test_origin_names_the_file(tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text(load("chat").to_yaml())
    assert open_source(str(path), []).origin("training.seed") == str(path)


def test_origin_names_the_data(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("text\n")
    found = open_source(str(path), [])
    assert found.origin("data.source") == str(path)
    assert found.origin("training.max_steps") == "preset causal-lm"


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("training.learning_rate", "cannot continue"),
        ("training.eval_steps", "may continue"),
        ("compute.nodes", "not bit for bit"),
        ("compute.price_per_hour", "cost"),
        ("compute.pods.memory", "pods"),
        ("gate.margin", "gate decides again"),
        ("data.split_salt", "prepared data"),
        ("tune.budget.trials", "A study may continue"),
        ("observability.prometheus_port", "how a run is watched"),
    ],
)
def test_explanation_says_what_a_change_affects(chosen, field, words):
    assert words in explained(field, chosen).affects


@pytest.mark.parametrize(
    ("field", "suggestion"),
    [
        ("trainig.max_steps", "training.max_steps"),
        ("max_steps", "training.max_steps"),
        ("traning", "training"),
        ("training.max_steps.x", "training.max_steps"),
    ],
)
def test_unknown_field_names_the_closest(chosen, field, suggestion):
    with pytest.raises(BadInput) as caught:
        explained(field, chosen)
    assert suggestion in caught.value.remedy


@pytest.mark.parametrize("field", ["", ".", "no such", "name.x", "x" * 5000, "\U0001f600"])
def test_arbitrary_text_gives_only_an_error(chosen, field):
    with pytest.raises(BadInput) as caught:
        explained(field, chosen)
    assert len(str(caught.value)) < 300


def test_value_is_omitted_without_a_configuration(tmp_path):
    done = call("validate", "--explain", "gate.margin", folder=tmp_path)
    assert done.code == 0
    assert "default  0.0" in done.out
    assert "value" not in done.out
    assert call("validate", folder=tmp_path).code == 2


def test_invalid_value_leads_to_its_explanation(tmp_path):
    done = call("validate", "chat", "--set", "gate.margin=-1", folder=tmp_path)
    (command,) = re.findall("`steadytrain (.+?)`", done.err)
    assert "(≥ 0)" in call(*command.split(), folder=tmp_path).out


def test_command_prints_text_or_json(tmp_path):
    arguments = ("validate", "chat", "--explain", "training.warmup_steps")
    text = call(*arguments, folder=tmp_path).out
    assert "float (≥ 0)" in text
    assert "optimizer steps, or a share below 1" in text
    told = json.loads(call(*arguments, "--json", folder=tmp_path).out)
    assert (told["type"], told["limits"], told["default"]) == ("float", "≥ 0", 0.05)

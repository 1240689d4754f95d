"""What a YAML document may contain."""

from __future__ import annotations

import pytest

from steadytrain.components.shared.config import load
from steadytrain.components.shared.config.document import dump, parse
from steadytrain.components.shared.errors import BadInput


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("gate: {margin: 0.05}\ndata: {}\ngate: {}", "gate appears twice (lines 2 and 4)"),
        ("gate: {margin: 0.1,\n  margin: 0}", "margin appears twice (lines 2 and 3)"),
        ("gate: {'margin': 0.1, margin: 0}", "margin appears twice (line 2)"),
        ("data:\n- {a: 1}\n- {b: 1, b: 1}", "b appears twice (line 4)"),
        ("gate: {Xk29-secret: 1, Xk29-secret: 2}", "a key appears twice (line 2)"),
    ],
)
def test_duplicate_key_is_an_error_that_names_its_lines(text: str, told: str) -> None:
    with pytest.raises(BadInput, match="not valid YAML at line") as caught:
        load(f"name: tiny\n{text}\n")
    assert told in caught.value.message
    assert "Xk29" not in str(caught.value)


def test_override_with_a_duplicate_key_is_rejected() -> None:
    with pytest.raises(BadInput, match="margin appears twice"):
        load("causal-lm", ["gate={margin: 0.1, margin: 0}"])


def test_merged_key_may_be_overridden() -> None:
    text = "a: &x {b: 1, c: 2}\nd: &y {<<: *x, b: 3}\ne: {<<: *y}\n"
    content = parse(text, "it")
    assert content["d"] == content["e"] == {"b": 3, "c": 2}


@pytest.mark.parametrize("text", ["1e-5", "-2E3", "1.5e3", ".5e+2", "3.e1"])
def test_number_with_an_exponent_is_a_number(text: str) -> None:
    assert parse(f"{{a: {text}, b: '{text}', c: {text}x}}", "it") == {
        "a": float(text),
        "b": text,
        "c": f"{text}x",
    }
    assert parse(dump({"a": text, "b": float(text)}), "it") == {"a": text, "b": float(text)}


@pytest.mark.parametrize("text", ["010", "-07", "1:30", "1:30.5", "0_8"])
def test_forms_that_only_yaml_1_1_takes_for_numbers_are_text(text: str) -> None:
    assert parse(text, "x") == text


def test_options_of_a_schedule_may_have_an_exponent() -> None:
    options = {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": "{min_lr: 1e-5}"}
    config = load("causal-lm", [f"training.{name}={value}" for name, value in options.items()])
    assert config.training.lr_scheduler_kwargs == {"min_lr": 1e-5}

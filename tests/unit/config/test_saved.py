"""A saved configuration that was edited or cut short is refused, and the sections are named."""

from __future__ import annotations

import re

import pytest

from steadytrain.components.shared.config import RunConfig, load, preset_names
from steadytrain.components.shared.errors import BadInput

CONFIG = load("causal-lm", ["gate.margin=0.25", "evaluation.batch_size=3"])
TEXT = CONFIG.to_saved().decode()


def refusal(text: str) -> str:
    with pytest.raises(BadInput, match="was edited or cut short after a run saved it") as caught:
        load(text)
    assert "remove its first line" in caught.value.remedy
    return caught.value.message.partition("saved it: ")[2]


@pytest.mark.parametrize("name", preset_names())
def test_unchanged_file_reads_back_equal(name: str) -> None:
    config = load(name)
    assert load(config.to_saved().decode()) == config


@pytest.mark.parametrize(
    ("old", "new", "sections"),
    [
        ("margin: 0.25", "margin: 0.0", "gate"),
        ("batch_size: 3", "batch_size: 4", "evaluation"),
        ("\nname: ", "\nname: x", "name"),
        ("  margin: 0.25\n", "", "gate"),
    ],
)
def test_edit_names_its_section(old: str, new: str, sections: str) -> None:
    assert TEXT.count(old) == 1
    assert refusal(TEXT.replace(old, new)) == sections


@pytest.mark.slow
def test_file_cut_after_any_line_is_never_used() -> None:
    ends = [found.end() for found in re.finditer("\n", TEXT)]
    for end in ends[1:-1]:
        with pytest.raises(BadInput):
            load(TEXT[:end])
    assert "gate (missing)" in refusal(TEXT[: TEXT.index("\ngate:") + 1])


def test_without_its_first_line_or_from_an_older_version_the_file_is_used_as_it_is() -> None:
    _, _, rest = TEXT.replace("margin: 0.25", "margin: 0.5").partition("\n")
    assert load(rest).gate.margin == 0.5
    assert load(CONFIG.to_yaml()) == CONFIG


def test_layout_and_comments_do_not_count() -> None:
    first, _, rest = TEXT.partition("\n")
    found: RunConfig = load(f"{first}\n# mine\n\n{rest}\n")
    assert found == CONFIG

"""Any value of any configuration field: it works, or the error says what to do."""

from __future__ import annotations

import contextlib
import json

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from steadytrain.components.shared.config import from_mapping, load, to_parameters
from steadytrain.components.shared.errors import BadInput, ConfigError
from steadytrain.pipelines.outline import outline

from support.odd import FIELDS, LONG, QUICK, endless_values, plain_values, yaml_text

ENDLESS = ("", "name", "schema_version", "model.config", "compute.pods.tolerations")
MINIMAL = {"name": "tiny", "data": {"source": ["a.txt"]}, "model": {"base": "folder"}}


def works_or_tells(make, known=None):
    """Check one configuration, unless `known` contains an identical one."""
    try:
        config = make()
    except BadInput as error:
        check_error(error)
        return
    if known is not None:
        content = config.model_dump_json()
        if content in known:
            return
        known.add(content)
    assert load(config.to_yaml()) == config
    json.dumps(to_parameters(config, run=config.run_id), allow_nan=False).encode()
    with contextlib.suppress(BadInput):
        "\n".join(outline(config)).encode()


def check_error(error):
    assert len(str(error)) < 20_000
    if isinstance(error, ConfigError):
        assert all(item.field and item.value and item.remedy for item in error.problems)
    else:
        assert error.remedy


def given_as_override(field, text):
    base = yaml.safe_dump(MINIMAL)
    works_or_tells(lambda: load(base, [f"{field}={text}"]))


def given_in_a_file(field, text):
    *sections, last = field.split(".")
    head = "".join(f"{section}: {{" for section in sections)
    line = f"{head}{last}: {text}{'}' * len(sections)}"
    works_or_tells(lambda: load(f"name: tiny\n{line}\n"))


def put(content, field, value):
    """Return a copy with one field set."""
    head, _, rest = field.partition(".")
    inner = content.get(head)
    if rest:
        value = put(inner if isinstance(inner, dict) else {}, rest, value)
    return {**content, head: value}


@pytest.mark.slow
@pytest.mark.parametrize("every", [15, pytest.param(1, marks=pytest.mark.long)])
def test_every_field_accepts_or_rejects_any_value(every):
    """Each field gets one value of `every`, and neighbors get different ones."""
    known = set()
    for place, field in enumerate(FIELDS):
        values = plain_values()[place % every :: every]
        for value in [*values, *(endless_values() if field in ENDLESS else ())]:
            content = put(MINIMAL, field, value)
            works_or_tells(lambda content=content: from_mapping(content), known)


@pytest.mark.slow
@QUICK
@given(st.sampled_from(FIELDS), yaml_text)
def test_set_survives_any_text(field, text):
    given_as_override(field, text)


@QUICK
@given(st.sampled_from(FIELDS), yaml_text)
@example("training.lr_scheduler_type", "x" * 50_000)
@example("data.csv.encoding", "x" * 50_000)
def test_file_survives_any_text(field, text):
    given_in_a_file(field, text)


@pytest.mark.soak
@LONG
@given(st.sampled_from(FIELDS), yaml_text)
def test_set_survives_any_text_for_long(field, text):
    given_as_override(field, text)


@pytest.mark.soak
@LONG
@given(st.sampled_from(FIELDS), yaml_text)
def test_file_survives_any_text_for_long(field, text):
    given_in_a_file(field, text)

"""The generated reference leaves nothing out."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import subprocess
import sys

import pytest
import typer.main

from steadytrain.components.observe.alerts import ALERTS
from steadytrain.components.observe.metrics import METRICS
from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.fields import effect_of
from steadytrain.components.shared.events import types
from steadytrain.components.shared.log import CONCLUSIONS
from steadytrain.components.train.failures import FailureClass
from steadytrain.pipelines.cli import app
from steadytrain.pipelines.server.schedule_file import ScheduleFile

WITHOUT_UNIT = {
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "alpha",
    "beta",
    "confidence",
    "cutmix",
    "decay",
    "desirable_weight",
    "dropout",
    "early_stopping_threshold",
    "epsilon",
    "floors",
    "fold",
    "gamma",
    "label_smoothing_factor",
    "learning_rate",
    "lr_scale",
    "layer_decay",
    "margin",
    "max_grad_norm",
    "max_label_shift",
    "max_length_shift",
    "max_slice_regression",
    "max_word_shift",
    "near_duplicate_threshold",
    "probability",
    "radius",
    "rank",
    "reduction_factor",
    "schema_version",
    "seed",
    "temperature",
    "undesirable_weight",
    "weight",
    "weight_decay",
}
"""Numbers that are ratios, factors or names."""


@pytest.fixture(scope="module")
def pages():
    from reference.pages import PAGES

    return {address: text() for address, text in PAGES.items()}


def rows(page):
    """Cells of each row of the page's tables, by the first one."""
    lines = [line for line in page.splitlines() if line.startswith("| `")]
    cells = ([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines)
    return {row[0].strip("`"): row for row in cells}


def leaves(schema, node, prefix=""):
    """Full name and schema of each field, by the JSON Schema."""
    for name, item in node.get("properties", {}).items():
        target = item.get("items", item)
        target = schema["$defs"].get(target.get("$ref", "").rpartition("/")[2], target)
        if "properties" in target:
            yield from leaves(schema, target, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", item


@pytest.mark.parametrize(
    ("model", "address"),
    [(RunConfig, "reference/configuration.md"), (ScheduleFile, "reference/schedules.md")],
)
def test_every_field_is_listed_with_default_meaning_and_unit(pages, model, address):
    schema = model.model_json_schema()
    found = rows(pages[address])
    fields = dict(leaves(schema, schema))
    assert len(fields) > 10
    for name, item in fields.items():
        _, kind, default, unit, meaning, *affects = found[name]
        assert affects == ([effect_of(name).label] if model is RunConfig else []), name
        assert kind, name
        assert default, name
        assert meaning, name
        assert item.get("description"), name
        kinds = {item.get("type"), *(other.get("type") for other in item.get("anyOf", ()))}
        is_number = bool(kinds & {"integer", "number"})
        assert bool(unit) or not is_number or name.rpartition(".")[2] in WITHOUT_UNIT, name


def test_every_command_and_option_is_listed(pages):
    page = pages["reference/commands.md"]

    def visit(name, command):
        for inner, found in getattr(command, "commands", {}).items():
            visit(f"{name} {inner}", found)
        if not hasattr(command, "commands"):
            section = page.split(f"## {name}\n")[1].split("\n## ")[0]
            for item in command.params:
                assert item.param_type_name == "argument" or item.opts[0] in section, (name, item)

    visit("steadytrain", typer.main.get_command(app))


def test_every_event_and_field_is_listed(pages):
    page = pages["reference/events.md"]
    classes = [
        node
        for node in ast.parse(inspect.getsource(types)).body
        if isinstance(node, ast.ClassDef) and any(ast.unparse(b) == "Event" for b in node.bases)
    ]
    assert len(classes) > 10
    for node in classes:
        kind = getattr(types, node.name)
        section = page.split(f"## {kind.name}\n")[1].split("\n## ")[0]
        for item in node.body:
            told = ast.unparse(item.annotation) if isinstance(item, ast.AnnAssign) else "ClassVar"
            if not told.startswith(("ClassVar", "BatchSettings")):
                assert f"| `{item.target.id}` |" in section, (kind.name, item.target.id)


def test_batch_settings_are_fields_of_their_events(pages):
    page = pages["reference/events.md"]
    for kind in (types.AttemptStarted, types.DecisionMade):
        section = page.split(f"## {kind.name}\n")[1].split("\n## ")[0]
        for item in dataclasses.fields(BatchSettings):
            assert f"| `{item.name}` |" in section, (kind.name, item.name)
        assert "| `batch` |" not in section


def test_every_failure_class_is_listed_with_its_fix(pages):
    found = rows(pages["reference/failures.md"])
    for kind in FailureClass:
        _, meaning, retried, fix = found[kind.value]
        assert meaning, kind
        assert retried == ("yes" if kind.retryable else "no")
        assert fix == kind.remedy


def test_every_metric_is_there_with_its_names_unit_and_meaning(pages):
    found = rows(pages["reference/metrics.md"])
    for metric in METRICS.values():
        _, names, kind, unit, label, meaning = found[metric.name]
        assert [name.strip("` ") for name in names.split(",")] == list(metric.series)
        assert (kind, unit) == (metric.kind, metric.unit)
        assert metric.label in label
        assert meaning


def test_every_alert_is_there_with_its_meaning_and_fix(pages):
    found = rows(pages["reference/alerts.md"])
    for alert in ALERTS:
        _, severity, meaning, expression, _, fix = found[alert.name]
        assert (severity, fix) == (alert.severity, alert.remedy)
        assert "$labels" not in meaning
        assert expression.strip("`") == alert.expression
    assert {item.name for item in CONCLUSIONS} <= found.keys()


@pytest.mark.slow
def test_every_environment_variable_is_listed(pages):
    from reference.environment import INTERNAL, MEANINGS, named

    assert named() == set(MEANINGS) | INTERNAL
    assert set(rows(pages["reference/environment.md"])) == set(MEANINGS)


def test_python_api_has_a_docstring_for_everything(pages):
    page = pages["reference/python.md"]
    found = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    assert len(found) > 20
    assert all(len(text.split()) > 3 and text != "None\n" for text in found)
    assert not re.search(r"\n\n\s*\n```", page)


@pytest.mark.slow
def test_modules_of_the_python_api_import_no_torch():
    from reference.python import API

    program = f"import sys, {', '.join(API)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0

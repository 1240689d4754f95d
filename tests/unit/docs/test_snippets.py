"""The configurations, records and Python of the documentation are ones that the product takes."""

from __future__ import annotations

import ast
import builtins
import json
import tomllib

import pytest
import yaml

from steadytrain.components.preprocess.validate import check
from steadytrain.components.shared import plugins
from steadytrain.components.shared.config import RunConfig, from_mapping, load
from steadytrain.components.sizing.hardware import priced
from steadytrain.components.tasks.base import open_encoder
from steadytrain.pipelines.server.schedule_file import ScheduleFile

from support.manifests import build
from support.plugins import SOURCE, install_example
from support.snippets import README, ROOT, blocks

CHAT = "supervised_finetuning"


def merged(base, more):
    """A mapping over another one, sections into each other."""
    both = dict(base)
    for key, value in more.items():
        inner = base.get(key)
        whole = isinstance(inner, dict) and isinstance(value, dict)
        both[key] = merged(inner, value) if whole else value
    return both


def check_schedules(content, folder):
    declared = ScheduleFile.model_validate(content)
    for schedule in declared.schedules:
        load(schedule.config, schedule.overrides)


def check_prices(content, folder):
    file = folder / "prices.yaml"
    file.write_text(yaml.safe_dump(content))
    prices = priced(file)
    known = {gpu.name: gpu.usd_per_hour for gpu in prices.gpus} | {"CPU": prices.core}
    assert {name: known[name] for name in content} == {
        name: price["usd_per_hour"] for name, price in content.items()
    }


def check_overlay(content, folder):
    names = [path.rpartition("/")[2] for path in content["components"]]
    objects = build("standalone", names, folder, images=content["images"])
    wanted = {image["newName"] for image in content["images"]}
    text = yaml.safe_dump_all(objects)
    assert content["resources"] == ["../../base"]
    assert any(name in text for name in wanted)


def check_configuration(content, folder):
    """A whole one, or sections of one, over a preset that leaves nothing out.

    A model from scratch is one of images, since the other presets have a base.
    """
    whole = {"name", "data", "model"} <= set(content)
    preset = "images" if "config" in content.get("model", {}) else "chat"
    from_mapping(content if whole else merged(load(preset).model_dump(mode="json"), content))


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    return install_example(tmp_path_factory.mktemp("example"))


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_yaml_snippets_are_valid(block, tmp_path, example, monkeypatch):
    monkeypatch.syspath_prepend(example)
    content = yaml.safe_load(block.text)
    if "schedules" in content:
        check_schedules(content, tmp_path)
    elif content.get("kind") == "Kustomization":
        check_overlay(content, tmp_path)
    elif set(content) <= set(RunConfig.model_fields):
        check_configuration(content, tmp_path)
    else:
        check_prices(content, tmp_path)


@pytest.mark.parametrize("block", blocks("toml"), ids=str)
def test_entry_point_snippets_use_known_groups(block):
    """And those of tests/plugins, which other tests install."""
    given, example = (
        tomllib.loads(text)["project"]["entry-points"]
        for text in (block.text, (ROOT / "tests" / "plugins" / "pyproject.toml").read_text())
    )
    groups = {value for name, value in vars(plugins).items() if name.isupper() and name[0] != "_"}
    assert set(given) <= groups
    for group, entries in given.items():
        assert entries.keys() <= example[group].keys()


@pytest.mark.parametrize("name", ["families.py", "regression.py", "regression_model.py"])
def test_documented_code_is_the_tested_one(name):
    code = (SOURCE / "steadytrain_example" / name).read_text()
    named = code.replace("steadytrain_example", "my_package")
    assert [block for block in blocks("python") if block.text == named]


@pytest.mark.parametrize("block", blocks("json"), ids=str)
def test_json_lines_are_records_of_a_task(block):
    for line in block.text.splitlines():
        record = json.loads(line)
        tasks = {"chosen": "preference", "label": "unpaired_preference"}
        task = next((tasks[column] for column in tasks if column in record), CHAT)
        data = load("chat", {"data.task": task}).data
        assert check(record, data, open_encoder(data)).content


def is_light(node):
    """Imports, classes, and configurations that are loaded: all but the work itself."""
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
        return isinstance(node.value.func, ast.Name) and node.value.func.id == "load"
    return isinstance(node, ast.Import | ast.ImportFrom | ast.ClassDef | ast.FunctionDef)


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_snippets_run_up_to_the_training(block, tmp_path, monkeypatch):
    (config,) = (item.text for item in blocks("yaml") if item.page == README)
    (tmp_path / "my.yaml").write_text(config)
    monkeypatch.chdir(tmp_path)
    tree = ast.parse(block.text)
    light = ast.Module([node for node in tree.body if is_light(node)], type_ignores=[])
    names = {"__name__": "snippet"}
    exec(compile(light, str(block), "exec", dont_inherit=True), names)
    made = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    used = {node.func.id for node in ast.walk(tree) if is_call_of_a_name(node)}
    assert used <= set(names) | made | set(dir(builtins))


@pytest.mark.parametrize("module", ["ema", "orders"])
def test_documented_examples_are_the_tested_ones(module):
    source = (ROOT / "tests" / "plugins" / "steadytrain_example" / f"{module}.py").read_text()
    code = source.partition('"""\n\n')[2]
    assert code in [block.text for block in blocks("python")]


def is_call_of_a_name(node):
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name)

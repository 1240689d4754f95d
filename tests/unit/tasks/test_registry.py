"""Tasks are found by their entry points or their addresses."""

from __future__ import annotations

import pickle
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from steadytrain.components.shared import plugins
from steadytrain.components.shared.config import DataConfig, from_mapping
from steadytrain.components.shared.config.data_sections import (
    MULTI_TASK,
    MULTIMODAL,
    SERIES,
    TABLES,
)
from steadytrain.components.shared.digest import DATA_CODE, JUDGING_CODE, TRAINING_CODE
from steadytrain.components.shared.errors import BadInput, ConfigError
from steadytrain.components.tasks.base import (
    OpenTask,
    load_task,
    open_encoder,
    task_code,
)
from steadytrain.components.tasks.built_in import SEQUENCE_CLASSIFICATION
from steadytrain.components.tasks.checks import check_task
from steadytrain.components.tasks.encoding.chat import ChatEncoder
from steadytrain.components.tasks.encoding.labeled_text import LabeledTextEncoder
from steadytrain.pipelines.early_checks import check_plugins

from support.training import Bench, class_rows, write_data

MINE = """
from dataclasses import replace
from steadytrain.components.tasks.base import late
from steadytrain.components.tasks.built_in import SEQUENCE_CLASSIFICATION

LATE = replace(SEQUENCE_CLASSIFICATION, training=late("no_such_module:Training"))


class Subclass:
    task = "sequence_classification"


class Nothing:
    pass
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The file of a module `mine_NAME` with tasks, on the Python path."""
    module = f"mine_{abs(hash(tmp_path))}"
    file = tmp_path / f"{module}.py"
    file.write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    return file


def test_each_name_has_its_encoder():
    assert isinstance(open_encoder(DataConfig(source=["x"])).columns(), list)
    chat = DataConfig(source=["x"], task="supervised_finetuning")
    assert isinstance(open_encoder(chat), ChatEncoder)


def data_for(task):
    """Return the fields of `data`."""
    if task != MULTI_TASK:
        fields = {"target": "y"} if task in (*TABLES, *SERIES, *MULTIMODAL) else {}
        series = {"series": {"horizon": 3}} if task in SERIES else {}
        return {"source": ["x"], "task": task} | fields | series
    return {"task": task, "parts": {name: {"source": ["x"]} for name in ("mood", "topic")}}


@pytest.mark.parametrize("name", plugins.names(plugins.TASKS))
def test_encoder_can_be_sent_to_another_process(name):
    encoder = open_encoder(DataConfig(**data_for(name)))
    assert pickle.loads(pickle.dumps(encoder)) == encoder


def test_class_that_trains_takes_the_other_parts_from_a_built_in_task(mine):
    task = load_task(f"{mine.stem}:Subclass")
    assert task.training.__name__ == "Subclass"
    assert task.encoder is LabeledTextEncoder
    assert task.packager is SEQUENCE_CLASSIFICATION.packager


@pytest.mark.parametrize("name", ["Nothing", "MINE", "no_such_name"])
def test_non_task_is_rejected(mine, name):
    with pytest.raises(BadInput, match=rf"data\.task = '{mine.stem}:{name}'") as error:
        load_task(f"{mine.stem}:{name}")
    assert "causal_lm" in error.value.remedy


def test_module_that_fails_is_rejected(mine):
    mine.write_text("1 / 0")
    with pytest.raises(BadInput, match="division by zero"):
        load_task(f"{mine.stem}:Subclass")


def test_part_is_imported_when_it_is_opened(mine, tmp_path):
    data = write_data(
        tmp_path / "data", class_rows(2), [], task=f"{mine.stem}:LATE", labels=["a", "b", "c"],
        schema=LabeledTextEncoder(DataConfig(source=["x"])).schema,
    )  # fmt: skip
    task = OpenTask(Bench.make(tmp_path, data).config, data)
    assert task.scorer
    with pytest.raises(BadInput, match="no_such_module:Training cannot be imported"):
        assert task.training


def test_results_depend_on_user_task_code(mine):
    before = task_code(f"{mine.stem}:LATE")
    mine.write_text(f"{MINE}\n# another version\n")
    assert before != task_code(f"{mine.stem}:LATE") != ""
    assert task_code("causal_lm") == ""


def test_results_depend_on_the_whole_package(tmp_path, monkeypatch):
    package = tmp_path / f"packed_{abs(hash(tmp_path))}"
    package.mkdir()
    for name in ("__init__", "task", "training"):
        (package / f"{name}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    before = task_code(f"{package.name}.task:TASK")
    (package / "training.py").write_text("RATE = 2\n")
    assert before != task_code(f"{package.name}.task:TASK")


def test_unknown_name_is_rejected_with_the_configuration(tmp_path):
    with pytest.raises(ConfigError, match=r"no installed package has causal_ml") as error:
        Bench.make(tmp_path, write_data(tmp_path / "data", [], [], task="causal_ml"))
    assert "causal_lm" in str(error.value)


ONLY_LANGUAGE_MODELS = {
    "model": {"base": "hub:x", "adapter": {"kind": "lora", "frozen_head": "4bit"}},
    "evaluation": {"tasks": ["a"]},
}


@pytest.mark.parametrize(("name", "accepted"), [("LATE", False), ("LANGUAGE", True)])
def test_task_says_whether_it_trains_a_language_model(mine, name, accepted):
    mine.write_text(
        f"{MINE}\nfrom steadytrain.components.tasks.built_in import CAUSAL_LM\n"
        "LANGUAGE = replace(CAUSAL_LM, training=None)\n"
    )
    data = {"source": ["x"], "task": f"{mine.stem}:{name}"}
    config = from_mapping({"name": "any", "data": data, **ONLY_LANGUAGE_MODELS})
    if accepted:
        check_task(config)
        return
    with pytest.raises(ConfigError) as caught:
        check_task(config)
    fields = {problem.field for problem in caught.value.problems}
    assert fields == {"model.adapter.frozen_head", "evaluation.tasks"}


@pytest.mark.parametrize("name", plugins.names(plugins.TASKS))
def test_settings_of_causal_language_models_are_rejected_for_others(name):
    gate = {"max_slice_regression": 0.02}
    content = {"name": "any", "data": data_for(name), "gate": gate}
    config = from_mapping(content | ONLY_LANGUAGE_MODELS)
    if not load_task(name).language_model:
        with pytest.raises(ConfigError, match="is for a causal language model's own head"):
            check_plugins(config)
    else:
        check_plugins(config)


def test_built_in_tasks_have_no_options():
    with pytest.raises(ValueError, match="causal_lm has no options"):
        DataConfig(source=["x"], task_options={"features": ["a"]})


def counts(module, folders):
    """Return whether a change of a module's code prevents the reuse of a step's outputs."""
    inside = "steadytrain.components.{}."
    return any(f"{module}.".startswith(inside.format(at.replace("/", "."))) for at in folders)


@pytest.mark.parametrize("name", plugins.names(plugins.TASKS))
def test_code_of_a_built_in_task_counts_for_the_reuse_of_each_step(name):
    task = load_task(name)
    assert counts(task.encoder.__module__, DATA_CODE)
    for part, folders in ((task.training, TRAINING_CODE), (task.scorer, JUDGING_CODE)):
        assert counts(part.address.partition(":")[0], folders)
    packager = task.packager.address.partition(":")[0]
    assert counts(packager, TRAINING_CODE)
    assert counts(packager, JUDGING_CODE)


@pytest.mark.parametrize("name", plugins.names(plugins.TASKS))
def test_parts_of_a_built_in_task_are_where_it_says(name):
    task = load_task(name)
    for part in (task.training, task.scorer, task.packager):
        module, _, attribute = part.address.partition(":")
        code = Path(find_spec(module).origin).read_text()
        assert re.search(rf"^(class|def) {attribute}\b", code, re.MULTILINE)


@pytest.mark.parametrize("name", plugins.names(plugins.TRAINERS))
def test_code_of_a_built_in_trainer_counts_for_the_reuse_of_training(name):
    assert counts(plugins.address(plugins.TRAINERS, name).partition(":")[0], TRAINING_CODE)

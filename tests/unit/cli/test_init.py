"""`init` writes a configuration that explains itself, validates, and is what `run DATA` runs."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

from steadytrain.components.shared.config import load
from steadytrain.pipelines import config_commands
from steadytrain.pipelines.sources import open_source

from support.odd import call

ROWS = {
    "chat.jsonl": {"prompt": "How?", "completion": "So."},
    "classes.jsonl": {"text": "how to reset it", "label": "help"},
    "text.jsonl": {"text": "some: text # with signs"},
}


@pytest.fixture(autouse=True)
def data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, row in ROWS.items():
        (tmp_path / name).write_text(f"{json.dumps(row)}\n")
    return tmp_path


@pytest.mark.parametrize("name", ROWS)
def test_written_file_equals_the_configuration_of_run_data(data, name):
    done = call("init", "my.yaml", "--data", name, "--yes", folder=data)
    assert (done.code, done.err) == (0, "")
    assert load("my.yaml") == open_source(name, []).config
    assert "steadytrain run my.yaml" in done.out
    assert call("validate", "my.yaml", folder=data).code == 0


def test_each_field_has_its_meaning_and_the_reason_for_its_value(data):
    call("init", "--data", "chat.jsonl", "--yes", folder=data)
    lines = (data / "steadytrain.yaml").read_text().splitlines()
    fields = [i for i, line in enumerate(lines) if ":" in line and "#" not in line]
    fields = [i for i in fields if not lines[i].endswith(":")]
    assert len(fields) > 8
    for index in fields:
        assert lines[index - 1].strip().startswith("#"), lines[index]
    text = " ".join(line.strip(" #") for line in lines)
    assert "the record has the columns prompt, completion" in text
    assert "Here: from the preset chat." in text


def test_settings_and_nested_sections_are_written(data):
    options = ("--set", "data.columns.label=label", "--set", "training.seed=7", "--run", "mine")
    options += ("--set", "data.columns.slice=label", "--output", str(data / "o: 'x' #"))
    call("init", "my.yaml", "--data", "classes.jsonl", "--yes", *options, folder=data)
    config = load("my.yaml")
    assert (config.training.seed, config.run) == (7, "mine")
    assert config.data.columns.slice == "label"
    assert config.output == str(data / "o: 'x' #")


def test_file_that_exists_is_overwritten_only_on_request(data):
    (data / "my.yaml").write_text("mine")
    done = call("init", "my.yaml", "--data", "chat.jsonl", "--yes", folder=data)
    assert (done.code, (data / "my.yaml").read_text()) == (2, "mine")
    assert "--force" in done.err
    assert call("init", "my.yaml", "--data", "chat.jsonl", "--force", folder=data).code == 0
    assert load("my.yaml").name == "chat"


def test_learning_rate_is_left_to_the_rule_for_another_model(data):
    arguments = ("init", "my.yaml", "--data", "text.jsonl", "--model", "hub:org/model")
    assert call(*arguments, folder=data).code == 0
    config = load("my.yaml")
    assert (config.model.base, config.model.config) == ("hub:org/model", {})
    assert config.training.learning_rate is None


def test_task_that_needs_a_trained_model_cannot_begin_from_scratch(data):
    done = call("init", "my.yaml", "--data", "chat.jsonl", "--model", "scratch", folder=data)
    assert done.code == 2
    assert "supervised_finetuning starts from a trained model" in done.err
    assert not (data / "my.yaml").exists()


def test_missing_data_is_reported_without_a_terminal(data):
    done = call("init", folder=data)
    assert (done.code, "--data" in done.err) == (2, True)


def test_terminal_prompts_for_data_and_model(data, monkeypatch):
    answers = iter(["text.jsonl", "hub:org/model"])
    asked = []

    def answer(question, **rest):
        asked.append((question, rest.get("default")))
        return next(answers)

    monkeypatch.setattr(config_commands.sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(config_commands.typer, "prompt", answer)
    done = call("init", "my.yaml", folder=data)
    assert done.code == 0
    assert [default for _, default in asked] == [None, "scratch"]
    assert load("my.yaml").model.base == "hub:org/model"


def test_file_that_cannot_be_written_is_an_error(data):
    done = call("init", "text.jsonl/my.yaml", "--data", "text.jsonl", "--yes", folder=data)
    assert done.code == 2
    assert "cannot be written" in done.err


def test_any_end_of_a_line_in_a_name_reads_back_equal(data):
    name = "a\x85b\u2028c\u2029d.jsonl"
    (data / "text.jsonl").rename(data / name)
    done = call("init", "my.yaml", "--data", name, "--yes", folder=data)
    assert done.code == 0, done
    assert load(data / "my.yaml").data.source == [name]


@pytest.mark.parametrize("output", ["text.jsonl", "text.jsonl/inner", "/dev/null"])
def test_output_that_is_a_file_is_an_error(data, output):
    done = call("init", "my.yaml", "--data", "text.jsonl", "--yes", "-o", output, folder=data)
    assert done.code == 2
    assert "is not a folder" in done.err
    assert not (data / "my.yaml").exists()


def test_json_output(data):
    done = call("init", "my.yaml", "--data", "chat.jsonl", "--json", folder=data)
    told = json.loads(done.out)
    assert (told["file"], told["task"]) == ("my.yaml", "supervised_finetuning")


def test_data_are_never_overwritten(data):
    before = (data / "text.jsonl").read_bytes()
    done = call("init", "text.jsonl", "--data", "text.jsonl", "--yes", "--force", folder=data)
    assert done.code == 2
    assert "text.jsonl is the data itself" in done.err
    assert (data / "text.jsonl").read_bytes() == before


def test_keys_have_placeholders_and_git_leaves_the_real_ones_out(data):
    done = call("init", "my.yaml", "--data", "text.jsonl", "--yes", folder=data)
    assert "wrote .env.example" in done.out
    lines = (data / ".env.example").read_text().splitlines()
    keys = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    assert {"HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MLFLOW_TRACKING_TOKEN"} <= keys.keys()
    assert all(re.fullmatch(r"your_[a-z0-9_]+_here", value) for value in keys.values())
    git = ["git", "-C", str(data)]
    subprocess.run([*git, "init", "-q"], check=True)
    for name in (".env", ".env.local"):
        (data / name).write_text("HF_TOKEN=real\n")
    subprocess.run([*git, "add", "."], check=True)
    added = subprocess.run([*git, "ls-files"], capture_output=True, text=True, check=True).stdout
    assert {".env.example", ".gitignore", "my.yaml"} <= set(added.split())
    assert not {".env", ".env.local"} & set(added.split())


def test_own_files_stay_and_missing_rules_are_added_once(data):
    (data / ".env.example").write_text("MINE=your_service_key_here\n")
    (data / ".gitignore").write_text("!.env.example\n.env*\n*.log")
    for _ in range(2):
        call("init", "my.yaml", "--data", "text.jsonl", "--yes", "--force", folder=data)
    assert (data / ".env.example").read_text() == "MINE=your_service_key_here\n"
    text = (data / ".gitignore").read_text()
    assert text == "!.env.example\n.env*\n*.log\n.env*\n!.env.example\n"


def test_no_env_writes_the_configuration_alone(data):
    call("init", "my.yaml", "--data", "text.jsonl", "--yes", "--no-env", folder=data)
    assert not (data / ".env.example").exists()
    assert not (data / ".gitignore").exists()

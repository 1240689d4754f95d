"""`--json`: one object with the documented keys on standard output, also for an error."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from steadytrain.components.shared.config import from_mapping, load
from steadytrain.components.shared.events.types import StepFailed
from steadytrain.components.shared.workspace import Workspace
from steadytrain.pipelines import local
from steadytrain.pipelines.cli import app
from steadytrain.pipelines.local import LocalRun

from support.odd import call, commands
from support.plugins import write_plugin
from support.snippets import ROOT
from support.written_run import Writer

ROW = re.compile(r"^\| `steadytrain ([^`]+)` \| (.+) \|$", re.MULTILINE)
DOCUMENTED = dict(ROW.findall((ROOT / "docs" / "guides" / "scripts.md").read_text()))


def documented(command):
    """Return the keys of a command's object, and those of its items if it is a list of them."""
    outer, _, inner = DOCUMENTED[command].partition("; ")[0].partition(": each with ")
    return {*re.findall(r"`(\w+)`", outer)}, {*re.findall(r"`(\w+)`", inner)}


@pytest.fixture
def folder(tmp_path):
    """A folder with a failed run in `out`, a configuration, and data."""
    content = {"data": {"source": ["a.txt"]}, "model": {"config": {"model_type": "llama"}}}
    content |= {"name": "tiny", "run": "tiny", "output": str(tmp_path / "out")}
    run = Writer(from_mapping(content))
    run.workspace.config.write_text(run.config.to_yaml())
    run.again()
    run.start_step("train")
    run.attempt(1, last=170, max_steps=400, outcome="failed", failure_class="gpu_oom", message="m")
    run.fail("train", "TrainingFailed", "no memory", "use less")
    (tmp_path / "my.yaml").write_text(run.config.to_yaml())
    (tmp_path / "a.txt").write_text("some text\n")
    return tmp_path


def printed(folder, *arguments, code=0):
    done = call(*arguments, "--json", folder=folder)
    assert done.code == code, done
    return json.loads(done.out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("init", ["new.yaml", "--data", "a.txt"]),
        ("validate", ["my.yaml"]),
        ("validate --explain", ["my.yaml", "--explain", "training.max_steps"]),
        ("run --dry-run", ["my.yaml", "--dry-run"]),
        ("step", ["report", "my.yaml"]),
        ("explain", ["tiny", "-o", "out"]),
        ("report", ["tiny", "-o", "out"]),
        ("stop", ["tiny", "-o", "out"]),
        ("gc", ["-o", "out", "--dry-run"]),
        ("list", ["-o", "out"]),
        ("top", ["-o", "out"]),
        ("presets", []),
        (
            "submit --dry-run",
            ["my.yaml", "--dry-run", "--output", "/mnt", "--set", "data.source=[hub:a]"],
        ),
    ],
)
def test_each_command_prints_the_keys_that_the_guide_lists(folder, command, arguments):
    told = printed(folder, command.split()[0], *arguments)
    outer, inner = documented(command)
    assert set(told) == outer
    if inner:
        (items,) = told.values()
        assert items
        assert all(set(item) == inner for item in items)


def test_compare_has_the_keys_that_the_guide_lists(folder):
    config = load(folder / "my.yaml")
    Writer(config.model_copy(update={"run": "other"}))
    told = printed(folder, "compare", "tiny", "other", "-o", "out")
    assert set(told) == documented("compare")[0]


def test_plan_has_at_least_the_keys_that_the_guide_lists(folder):
    arguments = ["chat", "--formula", "--gpu", "h100"]
    told = printed(folder, "plan", *arguments, "--set", "model.base=null", "--set", MODEL)
    assert set(told) > documented("plan")[0]


def test_run_ends_with_the_keys_that_the_guide_lists(folder, monkeypatch):
    config = load(folder / "my.yaml")
    failure = StepFailed(stage="train", error="TrainingFailed", message="m", remedy="r")
    ended = LocalRun(Workspace.of(config), False, None, failure)
    monkeypatch.setattr(local, "run_locally", lambda *_, **__: ended)
    for command, arguments in (("run", ["my.yaml"]), ("resume", ["tiny", "-o", "out"])):
        told = printed(folder, command, *arguments, code=1)
        assert set(told) == documented(command)[0]
        assert (told["outcome"], told["failure"]["message"]) == ("failed", "m")
        assert told["next"].startswith("steadytrain resume tiny")
    stopped = LocalRun(ended.workspace, False, signal.SIGINT, failure)
    monkeypatch.setattr(local, "run_locally", lambda *_, **__: stopped)
    told = printed(folder, "run", "my.yaml", code=130)
    assert (told["outcome"], told["failure"]) == ("stopped", None)


MODEL = (
    "model.config={model_type: llama, hidden_size: 64, num_hidden_layers: 2, "
    "num_attention_heads: 4, intermediate_size: 128, vocab_size: 512}"
)


def test_guide_lists_exactly_the_commands_with_the_option():
    known = {
        " ".join(path) for path, options in commands() if any(i.name == "--json" for i in options)
    }
    assert {name.partition(" --")[0] for name in DOCUMENTED} == known


def test_failed_run_reports_its_failure(folder):
    told = printed(folder, "explain", "tiny", "-o", "out")
    assert (told["state"], told["failure"]["remedy"]) == ("failed", "use less")
    assert (told["checkpoint_step"], told["max_steps"]) == (100, 400)
    assert told["attempts"][0]["failure_class"] == "gpu_oom"
    (run,) = printed(folder, "list", "-o", "out")["runs"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", run["started"])


def steadytrain(folder, *arguments):
    command = [sys.executable, "-m", "steadytrain.pipelines.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder)


@pytest.mark.slow
def test_errors_are_json_with_the_same_exit_status(folder):
    (folder / "bad.yaml").write_text("name: x\ndata: {source: [a], sorce: b}\ntrainin: {}\n")
    for arguments, kind, words in (
        (["validate", "bad.yaml"], "ConfigError", "data.sorce"),
        (["explain", "other", "-o", "out"], "BadInput", "'other'"),
        (["list", "--no-such"], "BadInput", "--no-such"),
        (["list", "-o", "my.yaml"], "BadInput", "not a folder"),
        (["no-such"], "BadInput", "no-such"),
    ):
        plain, done = steadytrain(folder, *arguments), steadytrain(folder, *arguments, "--json")
        assert (done.returncode, done.stderr) == (plain.returncode, ""), arguments
        error = json.loads(done.stdout)["error"]
        assert (error["type"], error["exit_status"]) == (kind, done.returncode)
        assert words in error["message"]
        assert error["remedy"] or error["problems"]
    problems = json.loads(steadytrain(folder, "validate", "bad.yaml", "--json").stdout)["error"]
    fields = {problem["field"] for problem in problems["problems"]}
    assert fields == {"data.sorce", "trainin", "model"}


@pytest.mark.slow
def test_check_that_fails_keeps_its_status(folder, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    done = steadytrain(folder, "doctor", "--json")
    checks = json.loads(done.stdout)["checks"]
    assert done.returncode == 1
    assert {"fail", "pass"} == {check["state"] for check in checks}
    assert all(set(check) == documented("doctor")[1] for check in checks)


def test_json_after_two_dashes_is_a_name(folder):
    done = steadytrain(folder, "explain", "-o", "out", "--", "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert "error: run '--json'" in done.stderr


NOISY = """
import os
print("hello")
os.system("echo from a child")
os.write(1, b"from C")
class Plugin:
    greater_is_better = True
    value = resampled = lambda *_: None
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--set", "training.max_steps=0"]])
def test_plugin_that_prints_leaves_standard_output_alone(folder, monkeypatch, options):
    write_plugin(folder / "site", "steadytrain.metrics", "noisy", NOISY)
    monkeypatch.setenv("PYTHONPATH", str(folder / "site"))
    done = steadytrain(folder, "validate", "my.yaml", "--json", *options)
    assert json.loads(done.stdout).keys() & {"valid", "error"}
    assert ("hello" in done.stderr) == (not options)


@pytest.mark.slow
def test_plan_that_cannot_be_written_is_one_object(folder):
    arguments = ["plan", "chat", "--formula", "--gpu", "h100", "--set", "model.base=null"]
    done = steadytrain(folder, *arguments, "--set", MODEL, "--write", "a.txt", "--json")
    assert done.returncode != 0
    assert "a.txt" in json.loads(done.stdout)["error"]["message"]


@pytest.mark.slow
def test_object_that_cannot_be_written_ends_with_status_1(folder):
    command = [sys.executable, "-m", "steadytrain.pipelines.cli", "presets", "--json"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=folder)
    said = "error: standard output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, said)


CONFIGURED = [
    *("validate", "plan", "run", "profile", "submit"),
    *("automl", "tune", "ablate", "cross-validate", "step", "init", "show-data"),
]


def test_every_command_with_a_configuration_takes_a_run_and_an_output():
    found = {" ".join(path): {item.name for item in options} for path, options in commands()}
    for name, options in found.items():
        if "--set" in options:
            assert "--output" in options, name
    assert {name for name, options in found.items() if {"--set", "--run"} <= options} == {
        *CONFIGURED
    }


@pytest.mark.parametrize("command", ["validate", "run"])
def test_run_and_output_options_win_over_file_and_overrides(folder, command):
    options = ["--set", "run=other", "--run", "mine", "--output", "here"]
    extra = ["--dry-run"] if command == "run" else ["--show"]
    done = call(command, "my.yaml", *options, *extra, folder=folder)
    assert "mine" in done.out
    assert "here" in done.out
    assert "other" not in done.out


def test_help_lists_commands_in_order_of_use(folder):
    text = call("--help", folder=folder).out
    shown = re.findall(r"^  ([\w-]+)  +\S", text.partition("Begin:")[2], re.MULTILINE)
    assert shown[:4] == ["init", "validate", "plan", "run"]
    assert set(shown) == set(typer.main.get_command(app).commands)

"""The `steadytrain` command from the user's point of view."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from steadytrain.components.shared.errors import BadInput
from steadytrain.pipelines.cli import app
from steadytrain.pipelines.runs import list_runs

from support.odd import call

COMMANDS = [
    "run",
    "list",
    "stop",
    "resume",
    "explain",
    "gc",
    "plan",
    "report",
    "compile",
    "submit",
    "schedule",
    "trigger",
    "watch",
    "validate",
    "schema",
    "presets",
    "doctor",
    "check",
    "step",
]


def in_a_process(*arguments):
    command = [sys.executable, "-m", "steadytrain.pipelines.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture
def steadytrain(tmp_path):
    return lambda *arguments: call(*map(str, arguments), folder=tmp_path)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches(command, tmp_path):
    done = call(command, "--help", folder=tmp_path)
    assert done.code == 0
    assert len(done.out.splitlines()) > 5


def test_validate_reports_every_problem_and_fails(steadytrain, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("name: x\ndata: {source: [a], sorce: b}\nmodel: {base: m}\ntrainin: {}\n")
    done = steadytrain("validate", path)
    assert done.code == 2
    assert "data.sorce = 'b': no such field" in done.err
    assert "did you mean training?" in done.err


def test_validate_shows_the_whole_configuration(steadytrain):
    done = steadytrain("validate", "causal-lm", "--set", "training.max_steps=5", "--show")
    assert done.code == 0
    assert "max_steps: 5" in done.out


def test_validate_names_settings_that_cannot_act(steadytrain):
    sets = ["max_steps=20", "eval_steps=10", "early_stopping_patience=3", "warmup_steps=50"]
    few = "--set=evaluation.max_examples=29"
    done = steadytrain("validate", "causal-lm", few, *(f"--set=training.{item}" for item in sets))
    assert done.code == 0
    assert "training.early_stopping_patience = 3: with training.eval_steps 10" in done.err
    assert "training.warmup_steps = 50: training has 20 steps" in done.err
    assert "training side" not in done.err
    assert "evaluation.max_examples = 29: fewer than gate.min_units = 30" in done.err


def test_schema_is_json_schema(steadytrain):
    schema = json.loads(steadytrain("schema").out)
    assert "training" in schema["properties"]


@pytest.mark.slow
def test_compile_writes_the_file(steadytrain, tmp_path):
    done = steadytrain("compile", "--output", tmp_path / "sub" / "p.yaml")
    assert done.code == 0
    assert (tmp_path / "sub" / "p.yaml").is_file()


def test_dry_run_shows_the_batch_and_writes_nothing(steadytrain, tmp_path):
    done = steadytrain(
        "run",
        "causal-lm",
        "--dry-run",
        "--set",
        "compute.nproc_per_node=2",
        "--set",
        "training.global_batch_size=24",
        "--set",
        "training.micro_batch_size=4",
        "--set=evaluation.max_examples=29",
    )
    assert done.code == 0
    assert "evaluation.max_examples = 29: fewer than gate.min_units = 30" in done.err
    assert "24 = 4 (micro-batch) x 3 (accumulation) x 2 (world size)" in done.out
    assert list(tmp_path.iterdir()) == []


def test_unknown_run_lists_existing_runs(steadytrain, tmp_path):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    for command in ("stop", "report", "resume", "explain"):
        done = steadytrain(command, "other", "--output", tmp_path)
        assert done.code == 2
        assert "mine" in done.err


def test_unknown_step_lists_known_steps(steadytrain):
    done = steadytrain("step", "trian", "causal-lm")
    assert done.code == 2
    assert "preprocess, tune, search, cross-validate, train, evaluate" in done.err


@pytest.mark.slow
def test_step_without_its_inputs_says_so(tmp_path):
    done = in_a_process("step", "train", "causal-lm", "--set", f"output={tmp_path}")
    assert done.returncode == 2
    assert "the step before this one has not finished" in done.stderr


def test_list_of_an_empty_folder(steadytrain, tmp_path):
    assert "no runs" in steadytrain("list", "--output", tmp_path).out


@pytest.mark.slow
def test_doctor_never_prints_a_credential(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_" + "q" * 34)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:hunter2@127.0.0.1:9")
    done = in_a_process("doctor", "--output", tmp_path)
    assert done.returncode == 1, "the tracking server is down"
    assert "HF_TOKEN: present" in done.stdout
    assert "qqq" not in done.stdout + done.stderr
    assert "hunter2" not in done.stdout + done.stderr


@pytest.mark.parametrize("command", ["report", "stop", "resume", "explain"])
@pytest.mark.parametrize("name", ["../../other/runs/tiny", "{tmp}/other/runs/tiny", "..", "a\nb"])
def test_run_name_is_never_a_path(make_run, tmp_path, command, name):
    run = make_run(output=tmp_path / "other")
    make_run(output=tmp_path / "output")
    before = {path: path.stat().st_mtime_ns for path in run.workspace.output.rglob("*")}
    with pytest.raises(BadInput, match=r"not in .*output") as caught:
        app(
            [command, "-o", str(tmp_path / "output"), "--", name.format(tmp=tmp_path)],
            standalone_mode=False,
        )
    assert "its runs: tiny" in caught.value.remedy
    assert before == {path: path.stat().st_mtime_ns for path in run.workspace.output.rglob("*")}


def test_unrelated_folders_are_not_listed(make_run, tmp_path):
    make_run()
    for name in (".git", "A B", "tiny.old"):
        (tmp_path / "output" / "runs" / name).mkdir()
    assert [run.run_id for run in list_runs(tmp_path / "output")] == ["tiny"]

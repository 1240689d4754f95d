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
    "step",
]


def steadytrain(*arguments, cwd=None):
    command = [sys.executable, "-m", "steadytrain.pipelines.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches(command, tmp_path):
    done = call(command, "--help", folder=tmp_path)
    assert done.code == 0
    assert len(done.out.splitlines()) > 5


def test_validate_reports_every_problem_and_fails(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("name: x\ndata: {source: [a], sorce: b}\nmodel: {base: m}\ntrainin: {}\n")
    done = steadytrain("validate", path)
    assert done.returncode == 2
    assert "data.sorce = 'b': no such field" in done.stderr
    assert "did you mean training?" in done.stderr
    assert "Traceback" not in done.stderr


def test_validate_shows_the_whole_configuration():
    done = steadytrain("validate", "causal-lm", "--set", "training.max_steps=5", "--show")
    assert done.returncode == 0
    assert "max_steps: 5" in done.stdout


def test_validate_names_settings_that_cannot_act():
    sets = ["max_steps=20", "eval_steps=10", "early_stopping_patience=3", "warmup_steps=50"]
    few = "--set=evaluation.max_examples=29"
    done = steadytrain("validate", "causal-lm", few, *(f"--set=training.{item}" for item in sets))
    assert done.returncode == 0
    assert "training.early_stopping_patience = 3: with training.eval_steps 10" in done.stderr
    assert "training.warmup_steps = 50: training has 20 steps" in done.stderr
    assert "training side" not in done.stderr
    assert "evaluation.max_examples = 29: fewer than gate.min_units = 30" in done.stderr


def test_schema_is_json_schema():
    schema = json.loads(steadytrain("schema").stdout)
    assert "training" in schema["properties"]


@pytest.mark.slow
def test_compile_writes_the_file(tmp_path):
    done = steadytrain("compile", "--output", tmp_path / "sub" / "p.yaml")
    assert done.returncode == 0
    assert (tmp_path / "sub" / "p.yaml").is_file()


def test_dry_run_shows_the_batch_and_writes_nothing(tmp_path):
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
        cwd=tmp_path,
    )
    assert done.returncode == 0
    assert "evaluation.max_examples = 29: fewer than gate.min_units = 30" in done.stderr
    assert "24 = 4 (micro-batch) x 3 (accumulation) x 2 (world size)" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_unknown_run_lists_existing_runs(tmp_path):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    for command in ("stop", "report", "resume", "explain"):
        done = steadytrain(command, "other", "--output", tmp_path)
        assert done.returncode == 2
        assert "mine" in done.stderr


def test_unknown_step_lists_known_steps():
    done = steadytrain("step", "trian", "causal-lm")
    assert done.returncode == 2
    assert "preprocess, tune, cross-validate, train, evaluate" in done.stderr


@pytest.mark.slow
def test_step_without_its_inputs_says_so(tmp_path):
    done = steadytrain("step", "train", "causal-lm", "--set", f"output={tmp_path}")
    assert done.returncode == 2
    assert "the step before this one has not finished" in done.stderr


def test_list_of_an_empty_folder(tmp_path):
    assert "no runs" in steadytrain("list", "--output", tmp_path).stdout


@pytest.mark.slow
def test_doctor_never_prints_a_credential(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_" + "q" * 34)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:hunter2@127.0.0.1:9")
    done = steadytrain("doctor", "--output", tmp_path)
    assert done.returncode == 1, "the tracking server is down"
    assert "HF_TOKEN: present" in done.stdout
    assert "qqq" not in done.stdout + done.stderr
    assert "hunter2" not in done.stdout + done.stderr


@pytest.mark.parametrize("command", ["report", "stop", "resume", "explain"])
@pytest.mark.parametrize(
    "name", ["../../other/runs/tiny", "{tmp}/other/runs/tiny", "..", "", "a\nb"]
)
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

"""The log: one line for each event, with the fields that log collectors expect."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
from dataclasses import fields, replace
from datetime import datetime

import pytest

from steadytrain.components.shared import cluster
from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.events import Event
from steadytrain.components.shared.events.types import (
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    GradientOverflow,
    StepFailed,
    StepStarted,
    SupervisorStarted,
    TrainingDiverged,
    TrainingStarted,
    TrainingStep,
    Warned,
)
from steadytrain.components.shared.log import CONCLUSIONS, STANDARD, Log
from steadytrain.components.shared.stage import stage
from steadytrain.pipelines import local
from steadytrain.pipelines.cli import app
from steadytrain.pipelines.local import LocalRun

from support.decided import halved

BEGAN = 1_700_000_000.0
STARTED = AttemptStarted(
    time=BEGAN, attempt=2, world_size=2, batch=BatchSettings(4), gradient_accumulation_steps=3
)
READY = TrainingStarted(
    attempt=2, step=5, max_steps=9, parameters=7, device="cpu", precision="fp32"
)
STEP = TrainingStep(
    time=BEGAN + 1.25,
    attempt=2,
    step=10,
    epoch=0.5,
    loss=1.5,
    learning_rate=1e-3,
    grad_norm=0.7,
    tokens=100,
    tokens_per_second=50.0,
    gpu_memory_used=4096,
    memory_used=1000,
)
SAVED = CheckpointSaved(attempt=2, step=10, checkpoint="step-10", bytes=1, seconds=0.1)


def lines(*events, form="json"):
    found = []
    log = Log("run-1", form, found.append)
    for event in events:
        log.emit(event)
    assert all(line.count("\n") == 1 and line.endswith("\n") for line in found)
    return [json.loads(line) for line in found] if form == "json" else found


def config_of(tmp_path, **sections):
    content = {"data": {"source": ["a.txt"]}, "model": {"config": {"model_type": "llama"}}}
    return from_mapping(
        {**content, "name": "tiny", "run": "tiny", "output": str(tmp_path), **sections}
    )


def test_every_line_starts_with_the_same_fields():
    for line in lines(StepStarted(stage="train"), STARTED, READY, STEP, SAVED):
        assert tuple(line)[: len(STANDARD)] == STANDARD
    line = lines(STARTED, STEP)[-1]
    assert datetime.fromisoformat(line["time"]).timestamp() == BEGAN + 1.25
    assert (line["event"], line["level"], line["rank"]) == ("training_step", "info", 0)
    assert (line["job_id"], line["run"], line["attempt"]) == ("run-1", "run-1", 2)
    assert (line["step"], line["epoch"], line["loss"]) == (10, 0.5, 1.5)
    assert (line["gpu_memory_used"], line["tokens_per_second"]) == (4096, 50.0)


def test_line_has_what_was_last_known_of_the_attempt():
    _, _, _, saved, again, _ = lines(STARTED, READY, STEP, SAVED, STARTED, READY)
    assert (saved["loss"], saved["epoch"], saved["gpu_memory_used"]) == (1.5, 0.5, 4096)
    assert (again["loss"], again["step"], again["micro_batch_size"]) == (None, None, 4)
    evaluating = lines(STARTED, STEP, StepStarted(stage="evaluate"))[-1]
    assert (evaluating["attempt"], evaluating["loss"]) == (None, None)


@pytest.mark.parametrize(
    ("event", "name", "level"),
    [
        (READY, "training_started", "info"),
        (SAVED, "checkpoint_saved", "info"),
        (GradientOverflow(attempt=2, step=3, scale=8.0), "gradient_overflow", "warning"),
        (TrainingDiverged(attempt=2, step=3, loss=math.nan), "training_diverged", "fatal"),
        (
            AttemptEnded(attempt=2, step=3, outcome="failed", failure_class="gpu_oom"),
            "cuda_oom",
            "error",
        ),
        (halved(size=2, attempt=2), "cuda_oom", "error"),
        (
            AttemptEnded(attempt=2, step=3, outcome="failed", failure_class="collective_timeout"),
            "nccl_timeout",
            "error",
        ),
    ],
)
def test_names_and_levels_that_alerts_rely_on(event, name, level):
    line = lines(STARTED, event)[-1]
    assert (line["event"], line["level"], line["attempt"]) == (name, level, 2)


def test_every_kind_of_event_has_a_line_in_both_forms():
    events = [
        kind(**{item.name: SAMPLES[item.type] for item in fields(kind)})
        for kind in Event.__subclasses__()
    ]
    for form in ("json", "text"):
        assert len(lines(*events, form=form)) >= len(events)


SAMPLES = {
    "float": 1.0,
    "float | None": None,
    "int": 1,
    "int | None": 2,
    "int | float": 3,
    "int | float | None": None,
    "bool": True,
    "str": "two words",
    "str | None": None,
    "list[str]": ["a"],
    "list[str] | None": None,
    "dict[str, str]": {"a": "b"},
    "dict[str, float]": {"a": math.inf},
    "dict[str, int]": {"a": 1},
    "dict[str, list[float]]": {"a": [0.0, 1.0, 5]},
    "dict[str, Any]": {"a": [1]},
    "list[dict[str, Any]]": [{"a": 1}],
    "BatchSettings": BatchSettings(4),
    "BatchSettings | None": None,
    "AttemptOutcome": "failed",
}


def test_low_utilization_is_one_warning_until_the_gpu_is_busy_again():
    def busy(seconds, share):
        return replace(STEP, time=BEGAN + seconds, gpu_utilization=share)

    def warned(*events):
        return [line for line in lines(STARTED, *events) if line["event"] == "gpu_util_low"]

    low = [busy(seconds, 0.2) for seconds in range(0, 1500, 30)]
    (line,) = warned(*low)
    assert (line["level"], line["gpu_utilization"]) == ("warning", pytest.approx(0.2))
    assert line["remedy"]
    high = [busy(seconds, 0.95) for seconds in range(1500, 3000, 30)]
    again = [busy(seconds, 0.2) for seconds in range(3000, 4500, 30)]
    assert len(warned(*low, *high, *again)) == 2
    assert warned(*(busy(seconds, 0.2) for seconds in range(0, 500, 30))) == []
    assert warned(*(replace(item, gpu_utilization=None) for item in low)) == []


def test_every_conclusion_says_what_to_do():
    assert {item.name for item in CONCLUSIONS} == {"gpu_util_low", "cuda_oom", "nccl_timeout"}
    assert all(item.meaning and item.remedy for item in CONCLUSIONS)


def test_text_is_one_line_with_quoted_values():
    (line,) = lines(Warned(time=BEGAN, stage="train", message='a "b"\nc=d'), form="text")
    assert line == (
        "2023-11-14T22:13:20.000+00:00 warning warned run=run-1 stage=train "
        'message="a \\"b\\"\\nc=d"\n'
    )


@pytest.mark.parametrize("form", ["json", "text"])
def test_secrets_are_in_no_line(monkeypatch, form):
    canary = "canary-0123456789"
    monkeypatch.setenv("HF_TOKEN", canary)
    events = [
        Warned(stage="train", message=f"at {canary}"),
        StepFailed(stage="train", error="E", message=canary, remedy=canary),
        StepStarted(stage="train", environment={"a": canary, canary: "b"}),
        SupervisorStarted(generation=1, pid=1, host="h", settings={"a": {"b": [canary]}}),
        AttemptEnded(attempt=1, outcome="failed", step=1, failure_class="gpu_oom", message=canary),
    ]
    text = json.dumps(lines(*events, form=form))
    assert canary not in text
    assert "[redacted]" in text


def test_step_in_a_pod_writes_json_lines(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cluster, "in_pod", lambda: True)
    monkeypatch.setenv(cluster.POD_VARIABLE, "pod-1")
    with stage(config_of(tmp_path), "preprocess") as current:
        current.summary = "done"
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["event"] for line in found] == ["step_started", "step_finished"]
    assert found[-1]["summary"] == "done"


def test_step_that_fails_writes_why(tmp_path, capsys):
    config = config_of(tmp_path, observability={"logs": "json"})
    with pytest.raises(RuntimeError), stage(config, "preprocess"):
        raise RuntimeError("boom")
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["event"], last["level"], last["message"]) == ("step_failed", "error", "boom")


def test_step_on_a_machine_of_your_own_writes_nothing(tmp_path, capsys):
    with stage(config_of(tmp_path), "preprocess"):
        pass
    assert capsys.readouterr().out == ""


def test_reader_that_hangs_does_not_hold_up_a_step(tmp_path, monkeypatch):
    reading, writing = os.pipe()
    monkeypatch.setattr("steadytrain.components.shared.log.CLOSE_SECONDS", 0.3)
    config = config_of(tmp_path, observability={"logs": "json"})
    with os.fdopen(reading) as output:
        with os.fdopen(writing, "w") as full:
            monkeypatch.setattr(sys, "stdout", full)
            with stage(config, "preprocess") as current:
                for _ in range(2000):
                    current.emit(Warned(stage="preprocess", message="x" * 100))
            # The thread still waits for somebody who reads.
            (log,) = (thread for thread in threading.enumerate() if thread.name == "log")
            found = []
            reader = threading.Thread(target=lambda: found.extend(output))
            reader.start()
            log.join()
        reader.join()
    assert len(found) == 2002


def test_run_prints_json_lines_and_nothing_else(tmp_path, monkeypatch, capfd):
    def ran(config, _lock, *, display):
        display.emit(STEP)
        workspace = local.Workspace.of(config)
        return LocalRun(workspace, succeeded=False, stopped=2, failure=None)

    monkeypatch.setattr(local, "run_locally", ran)
    data = tmp_path / "data.txt"
    data.write_text("one\n")
    sets = [f"data.source=[{data}]", "observability.logs=json", f"output={tmp_path / 'output'}"]
    arguments = ["run", "causal-lm", *(f"--set={item}" for item in sets)]
    app(arguments, standalone_mode=False)
    told = capfd.readouterr()
    (line,) = told.out.splitlines()
    assert json.loads(line)["event"] == "training_step"
    assert told.err

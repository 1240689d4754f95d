"""A run's status, derived from its events alone."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from steadytrain.components.report.explain import explain
from steadytrain.components.report.facts import gather
from steadytrain.components.report.report_page import render
from steadytrain.components.report.sentences import as_line, from_log
from steadytrain.components.report.story import (
    attempts,
    executions,
    latest,
    outcome,
    phases,
    repeated_steps,
    wall_seconds,
    without_steps,
)
from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.config import load
from steadytrain.components.shared.events.types import (
    AttemptStarted,
    CheckpointSaved,
    DecisionMade,
    PodsPending,
    StepStarted,
    Terminated,
)
from steadytrain.components.shared.workspace import DataCheck, Workspace, keep_data_check


def told(run: Any) -> tuple[str, str]:
    standing = outcome(gather(run.workspace))
    return standing.state, standing.sentence


def states(run: Any) -> dict[str, str]:
    found = latest(executions(gather(run.workspace).events))
    return {item.stage: item.state for item in found}


def test_running_or_killed_step(bare: Any) -> None:
    bare.start_step("preprocess")
    state, sentence = told(bare)
    assert state == "unfinished"
    assert "preprocess is still running, or was killed" in sentence


def test_stopped_on_request(bare: Any) -> None:
    bare.preprocess()
    bare.start_step("train")
    bare.attempt(1, last=50, max_steps=100, outcome="stopped")
    bare.fail("train", "KeyboardInterrupt", "")
    assert told(bare) == ("stopped", "stdlib-lm was stopped in train, at training step 50.")


def test_between_two_steps(bare: Any) -> None:
    bare.preprocess()
    assert told(bare) == ("unfinished", "stdlib-lm has not continued after preprocess.")


def test_failure_that_was_fixed_is_not_reported(bare: Any) -> None:
    bare.preprocess()
    bare.start_step("train")
    bare.fail("train", "TrainingFailed", "out of memory")
    assert told(bare)[0] == "failed"
    bare.clock += 3600
    bare.again()
    bare.start_step("preprocess")
    bare.finish("preprocess", 0.1, reused=True)
    assert states(bare) == {"begin": "finished", "preprocess": "reused"}
    bare.start_step("train")
    bare.finish("train", 10)
    assert states(bare) == {"begin": "finished", "preprocess": "reused", "train": "finished"}
    assert told(bare)[0] == "unfinished"


def test_killed_step_ends_at_its_last_heartbeat(bare: Any) -> None:
    bare.start_step("preprocess")
    bare.clock += 5
    bare.warn("something", stage="preprocess")
    bare.clock += 1000
    bare.start_step("preprocess")
    bare.finish("preprocess", 7)
    found = executions(gather(bare.workspace).events)
    assert [item.state for item in found] == ["unfinished", "finished"]
    assert found[0].seconds == pytest.approx(5)
    assert found[1].seconds == pytest.approx(7)


def test_killed_step_before_another_step(bare: Any) -> None:
    bare.preprocess()
    bare.start_step("train")
    bare.clock += 5
    bare.warn("still here")
    bare.clock += 1000
    bare.start_step("evaluate")
    bare.finish("evaluate", 7)
    found = {item.stage: item for item in executions(gather(bare.workspace).events)}
    assert found["train"].state == "unfinished"
    assert found["train"].seconds == pytest.approx(5)


def test_promoted_run_is_complete_only_when_the_alias_is_set(language_model: Any) -> None:
    assert told(language_model)[0] == "finished"
    events = gather(language_model.workspace)
    events.events = [item for item in events.events if getattr(item, "stage", "") != "promote"]
    assert outcome(events).state == "unfinished"


def test_report_does_not_list_itself(language_model: Any) -> None:
    before = told(language_model)
    language_model.clock += 5
    language_model.start_step("report")
    assert told(language_model) == before


def test_phases_add_up_to_wall_time(language_model: Any) -> None:
    ran = executions(gather(language_model.workspace).events)
    # Gaps between steps are left out if they are shorter than half a second.
    whole = sum(seconds for _, seconds in phases(ran))
    assert whole == pytest.approx(wall_seconds(ran), abs=0.5)


def test_repeated_steps(language_model: Any) -> None:
    tried = attempts(gather(language_model.workspace))
    assert [(item.first_step, item.last_step) for item in tried] == [
        (0, 170),
        (100, 260),
        (200, 400),
    ]
    assert repeated_steps(tried) == 70 + 60


def test_attempt_whose_end_was_not_recorded(bare: Any) -> None:
    bare.start_step("train")
    bare.attempt(1, last=40, max_steps=100)
    facts = gather(bare.workspace)
    facts.events = [item for item in facts.events if item.name != "attempt_ended"]
    (attempt,) = attempts(facts)
    assert attempt.outcome == "cut off"
    assert attempt.last_step == 40
    assert attempt.end == facts.events[-1].time


def test_no_steps_take_no_time() -> None:
    assert wall_seconds([]) == 0
    assert phases([]) == []


def test_stopped_run_is_at_its_last_checkpoint(bare: Any) -> None:
    bare.preprocess()
    bare.start_step("train")
    bare.attempt(1, last=50, max_steps=100, outcome="preempted")
    saved = {"attempt": 1, "step": 54, "checkpoint": "step-54", "bytes": 1}
    bare.emit("train", CheckpointSaved, **saved, seconds=0.0, writing_seconds=0.0)
    bare.fail("train", "Stopped", "stopped")
    assert told(bare) == ("stopped", "stdlib-lm was stopped in train, at training step 54.")


def waits(run: Any, reason: str, attempt: int = 1) -> None:
    run.emit("launcher", PodsPending, attempt=attempt, job=f"x-a{attempt}", reason=reason)


def begin_attempt(run: Any, number: int) -> None:
    batch = BatchSettings(2)
    fields = {"attempt": number, "world_size": 1, "gradient_accumulation_steps": 1}
    run.emit("supervisor", AttemptStarted, batch=batch, **fields)


def test_run_whose_pods_wait_says_for_what(bare: Any) -> None:
    bare.preprocess()
    bare.start_step("train")
    begin_attempt(bare, 1)
    waits(bare, "Unschedulable: 0/3 nodes are available: 3 Insufficient cpu.")
    facts = gather(bare.workspace, running=True)
    assert outcome(facts).state == "pending"
    assert outcome(facts).sentence == (
        "stdlib-lm-1 waits for the pods of train: Unschedulable: 0/3 nodes are available: "
        "3 Insufficient cpu."
    )
    assert explain(bare.workspace, running=True)[0] == outcome(facts).sentence
    assert "Waiting for pods" in render(facts)
    waits(bare, "")
    assert outcome(gather(bare.workspace, running=True)).state == "running"


def test_wait_of_an_earlier_attempt_is_over(bare: Any) -> None:
    bare.start_step("train")
    begin_attempt(bare, 1)
    waits(bare, "Unschedulable: no node")
    begin_attempt(bare, 2)
    assert outcome(gather(bare.workspace, running=True)).state == "running"


def test_supervisor_lost_while_its_pods_waited(bare: Any) -> None:
    bare.start_step("train")
    begin_attempt(bare, 1)
    waits(bare, "Unschedulable: no node.")
    state, sentence = told(bare)
    assert state == "unfinished"
    assert sentence.endswith("or was killed, while its pods waited: Unschedulable: no node.")


def test_terminated_run_is_terminated_at_once_and_until_it_starts_again(bare: Any) -> None:
    bare.preprocess()
    bare.start_step("train")
    bare.attempt(1, last=50, max_steps=100)
    bare.emit("report", Terminated, kfp_run="a1", how="in Kubeflow Pipelines")
    bare.clock += 2
    bare.fail("train", "Stopped", "stopped")
    for running in (True, False):
        standing = outcome(gather(bare.workspace, running=running))
        assert standing.state == "terminated", "its lease is held until it expires"
        assert standing.sentence == (
            "stdlib-lm was terminated in train, at training step 50: in Kubeflow Pipelines."
        )
    bare.clock += 10
    bare.again()
    assert outcome(gather(bare.workspace, running=True)).state == "running"


def test_failure_before_a_termination_is_the_story(bare: Any) -> None:
    bare.start_step("train")
    bare.fail("train", "TrainingFailed", "out of memory")
    bare.emit("report", Terminated, kfp_run="a1", how="in Kubeflow Pipelines")
    assert told(bare)[0] == "failed"


def test_reused_training_names_its_run(bare: Any) -> None:
    bare.preprocess()
    bare.start_step("train")
    bare.finish("train", 0.1, reused=True, reused_from="yesterday")
    assert "training was reused from run yesterday" in explain(bare.workspace)


def test_study_trains_in_its_trials(bare: Any) -> None:
    bare.preprocess()
    bare.start_step("tune")
    assert "each trial trains in a run of its own" in explain(bare.workspace)


@pytest.mark.parametrize(
    ("step", "pipeline"),
    [
        ("train", ""),
        ("tune", "tune"),
        ("cross-validate", "cross-validate"),
        ("search", "automl"),
    ],
)
def test_run_of_a_cluster_is_submitted_again(bare: Any, step: str, pipeline: str) -> None:
    bare.emit(step, StepStarted, stage=step, pod="steadytrain-abcde-1")
    running = explain(bare.workspace, running=True)[-1]
    assert running.endswith("terminate it in Kubeflow Pipelines to stop it")
    bare.fail(step, "Stopped", "stopped")
    command = re.search("`(steadytrain submit .*)`", explain(bare.workspace)[-1])
    assert command
    _, _, source, *options = shlex.split(command[1])
    assert load(Path(source)).output == str(bare.workspace.output)
    assert options[:2] == ["--run", bare.workspace.run_id]
    assert options[2:] == (["--pipeline", pipeline] if pipeline else [])


def test_long_message_keeps_its_end(bare: Any) -> None:
    bare.start_step("train")
    bare.attempt(
        1,
        last=1,
        max_steps=9,
        outcome="failed",
        failure_class="user_bug",
        message=f"pod x, image {'y' * 400}: ErrImagePull: not found",
    )
    bare.emit(
        "supervisor",
        DecisionMade,
        attempt=1,
        failure_class="user_bug",
        action="stop",
        reason="user_bug would happen again",
    )
    (line,) = [line for line in explain(bare.workspace) if line.startswith("attempt 1 failed")]
    assert len(line) <= 300
    assert "ErrImagePull: not found); stop: user_bug would happen again" in line


@pytest.mark.parametrize(
    ("check", "state", "words"),
    [
        (None, "empty", "has not started a step"),
        (DataCheck(reason="nothing new: version 3"), "unchanged", "Nothing new: version 3."),
        (
            DataCheck(failure={"error": "BadInput", "message": "no files", "remedy": "add some"}),
            "failed",
            "failed in detect-change",
        ),
        (DataCheck(found=True, reason="the data differ"), "unfinished", "has not started"),
    ],
)
def test_pipeline_run_without_a_step(
    make_config: Any, check: DataCheck | None, state: str, words: str
) -> None:
    workspace = Workspace.of(make_config())
    if check:
        keep_data_check(workspace, "job-1", check)
    standing = without_steps(workspace, "job-1")
    assert standing.state == state
    assert words in standing.sentence
    assert without_steps(workspace, "job-1").state == "empty", "the check is forgotten"
    again = from_log(f"KFP says\n{as_line(standing)}\nmore")
    assert again
    assert (again.state, again.sentence) == (standing.state, standing.sentence)
    failures = [item.failure and item.failure.as_plain() for item in (again, standing)]
    assert failures[0] == failures[1]


def test_damaged_story_is_none(bare: Any) -> None:
    line = as_line(outcome(gather(bare.workspace)))
    for text in ("", "nothing here", line[:-3], line.replace("empty", "strange")):
        assert from_log(text) is None

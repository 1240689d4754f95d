"""Summarize a run in ten lines: failures, decisions, changes, and what to do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from steadytrain.components.report.explain import explain, explanation_as_data, summary
from steadytrain.components.report.facts import gather
from steadytrain.components.report.report_page import render
from steadytrain.components.report.sentences import describe
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import (
    CheckpointSkipped,
    DecisionMade,
    GradientOverflow,
    TrainingStep,
)
from steadytrain.components.shared.records import TRAINING_LOSS

from support.decided import halved


def fail(run: Any, number: int, first: int, last: int, reason: str, action: str = "retry") -> None:
    run.attempt(
        number,
        first=first,
        last=last,
        max_steps=400,
        outcome="failed",
        failure_class="host_oom",
        message=f"rank {number} was killed\nand more",
        remedy="give it more memory",
    )
    run.emit(
        "supervisor",
        DecisionMade,
        attempt=number,
        failure_class="host_oom",
        action=action,
        reason=reason,
    )


def test_each_recovery_is_one_line(bare: Any) -> None:
    bare.start_step("train")
    fail(bare, 1, 0, 170, "host_oom: 8 x 1 becomes 4 x 2", "retry_changed")
    fail(bare, 2, 100, 230, "host_oom, 1 of at most 3; nothing changes")
    bare.attempt(3, first=200, last=400, max_steps=400)
    lines = explain(bare.workspace, running=True)
    assert lines[0] == "stdlib-lm-1 is running: it is in train, at training step 400 of 400."
    assert "3 attempts: 2 host_oom, 1 finished" in lines
    assert (
        "attempt 1 failed at step 170 (rank 1 was killed); retry changed from step 100: "
        "host_oom: 8 x 1 becomes 4 x 2"
    ) in lines
    assert (
        "attempt 2 failed at step 230 (rank 2 was killed); retry from step 200: "
        "host_oom, 1 of at most 3; nothing changes"
    ) in lines
    assert any("newest checkpoint at step 400 of 400" in line for line in lines)
    assert lines[-1].startswith("next: nothing: the run recovers by itself; `steadytrain stop")
    page = render(gather(bare.workspace))
    assert "retry changed: host_oom: 8 x 1 becomes 4 x 2" in page
    assert "give it more memory" not in page, "that is for where it stops"


def test_score_of_a_model_that_was_never_validated_is_called_training_loss(bare: Any) -> None:
    bare.start_step("train")
    bare.attempt(1, last=400, max_steps=400)
    bare.trained(steps=400, metric=TRAINING_LOSS)
    told = "\n".join(summary(bare.workspace))
    assert "training loss of the last step, without a validation: 2.213" in told
    assert "best validation" not in told
    page = render(gather(bare.workspace))
    assert "of the last step; nothing was validated" in page
    assert "Best training_loss" not in page


def test_log_of_nccl_is_summarized_from_the_newest_attempt(bare: Any) -> None:
    bare.start_step("train")
    fail(bare, 1, 0, 170, "network, 1 of at most 3")
    bare.attempt(2, first=100, last=400, max_steps=400)
    for number, network in ((1, "Socket"), (2, "IB")):
        folder = bare.workspace.attempts / f"{number:04d}"
        folder.mkdir(parents=True)
        line = f"h:1:1 [0] NCCL INFO Using network {network}\n"
        (folder / "rank-1.log").write_text(line + "h:1:1 [0] x.cc:1 NCCL WARN a cable\n")
    told = "NCCL; no communicator became ready; network IB; warning: a cable"
    assert told in explain(bare.workspace)
    assert told in render(gather(bare.workspace))
    assert explanation_as_data(bare.workspace)["nccl"]["network"] == "IB"


def test_repeated_step_is_one_line_and_costs_no_work(bare: Any) -> None:
    bare.start_step("train")
    bare.attempt(1, last=400, max_steps=400)
    for size in (4, 2):
        bare.record("rank-0", halved(size=size, time=bare.clock))
    lines = explain(bare.workspace)
    assert "1 attempt: 1 finished" in lines
    assert lines[2:4] == [f"repeat step: smaller micro-batch: {size}" for size in (4, 2)]
    page = render(gather(bare.workspace))
    assert "smaller micro-batch: 4\nrepeat step: smaller micro-batch: 2" in page
    assert "taken twice" not in page


def test_run_with_many_faults_still_fits_in_ten_lines(bare: Any) -> None:
    bare.start_step("train")
    for number in range(1, 13):
        fail(bare, number, 0, 50, "again" if number < 12 else "x" * 999, "retry")
    bare.fail("train", "TrainingFailed", "first\x1bline\nsecond line", "fix it\nor not")
    lines = explain(bare.workspace)
    assert len(lines) == 10
    assert all(line and "\n" not in line and len(line) <= 300 for line in lines)
    assert lines[1] == "TrainingFailed: first line"
    assert "(8 earlier recoveries)" in lines
    assert any(line.startswith("no checkpoint yet") for line in lines)
    assert lines[-1].startswith("next: `steadytrain resume stdlib-lm-1 --output")
    assert lines[-1].endswith("`, after this fix: fix it or not")


def test_dead_supervisor_is_reported_with_the_step_its_successor_continued_from(bare: Any) -> None:
    bare.start_step("train")
    bare.attempt(
        1,
        last=130,
        max_steps=400,
        outcome="failed",
        failure_class="node_lost",
        message="the program that supervised this attempt died",
    )
    bare.attempt(2, first=100, last=150, max_steps=400, outcome="stopped")
    bare.fail("train", "KeyboardInterrupt", "stopped")
    lines = explain(bare.workspace)
    assert lines[0] == "stdlib-lm was stopped in train, at training step 150."
    assert any("a new supervisor continues from step 100" in line for line in lines)
    assert lines[-1].startswith("next: ")
    assert "`steadytrain resume stdlib-lm-1 --output" in lines[-1]


def test_finished_and_unstarted_runs(language_model: Any, make_config: Any) -> None:
    lines = explain(language_model.workspace)
    assert lines[0].endswith("the new champion.")
    assert any("goodput" in line for line in lines)
    assert lines[-1].startswith("next: nothing; `steadytrain report")


def test_before_training(bare: Any) -> None:
    assert "training has not been attempted" in explain(bare.workspace)


def test_skipped_checkpoint_is_named_everywhere(bare: Any) -> None:
    bare.start_step("train")
    fields = {"attempt": 2, "step": 1200, "resumed_from_step": 0, "reason": "x.bin: is cut off"}
    bare.emit("supervisor", CheckpointSkipped, **fields)
    said = "the checkpoint of step 1,200 is skipped, training starts from step 0: x.bin: is cut off"
    assert said in explain(bare.workspace)
    assert explanation_as_data(bare.workspace)["notes"] == [said]
    assert said in render(gather(bare.workspace))
    assert describe(CheckpointSkipped(**fields)) == f"train: {said}"


def test_clipped_and_skipped_steps_are_counted_in_one_line(bare: Any) -> None:
    bare.start_step("train")
    bare.emit("supervisor", GradientOverflow, attempt=1, step=7, scale=0.5)
    bare.emit("supervisor", GradientOverflow, attempt=1, step=100, clipped=0.75, steps=100)
    (said,) = [line for line in explain(bare.workspace) if "gradient_overflow" in line]
    assert said.startswith("2 x gradient_overflow, last step 100:")
    assert "75%" in said
    assert explanation_as_data(bare.workspace)["notes"] == [said]


def test_damaged_lines_of_the_log_are_counted_and_the_run_is_not_damaged(bare: Any) -> None:
    bare.start_step("train")
    path = bare.workspace.events / "train.jsonl"
    path.write_text(f'{path.read_text()}{{"torn": \nno event\n')
    said = f"{path}: left out because they are not events: 2 lines"
    assert said in explain(bare.workspace)
    assert explanation_as_data(bare.workspace)["notes"] == [said]
    assert said in render(gather(bare.workspace))
    assert gather(bare.workspace).unreadable == []


def test_advice_names_the_folder_of_the_runs(bare: Any) -> None:
    bare.attempt(1, last=200, max_steps=400)
    for event in list(read_events(bare.workspace.events)):
        if isinstance(event, TrainingStep):
            later = replace(event, step=event.step + 1, time=event.time + 1000, grad_norm=1e6)
            bare.record("rank-0", later)
    (problem,) = (
        item
        for item in explanation_as_data(bare.workspace)["problems"]
        if item["rule"] == "exploding_gradients"
    )
    command = f"steadytrain adjust {bare.workspace.run_id} --output {bare.workspace.output} --set"
    assert f"`{command} training.learning_rate=2e-5`" in problem["remedy"]

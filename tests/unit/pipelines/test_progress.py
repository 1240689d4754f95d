"""The display of a run, with and without a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.events.types import (
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    DecisionMade,
    GradientOverflow,
    StepFailed,
    StepFinished,
    StepStarted,
    TrainingDiverged,
    TrainingFinished,
    TrainingStarted,
    TrainingStep,
    Validated,
    Warned,
    WorkProgress,
)
from steadytrain.components.shared.quantities import amount
from steadytrain.pipelines.progress import ProgressDisplay

from support.decided import halved


def console(*, terminal):
    return Console(file=io.StringIO(), force_terminal=terminal, width=160, _environ={})


def shown(*events, terminal=False):
    to = console(terminal=terminal)
    progress = ProgressDisplay(to)
    for event in events:
        progress.emit(event)
    progress.close()
    return to.file.getvalue()


def training_step(step, time, *, gpu=0):
    return TrainingStep(
        time=time,
        attempt=1,
        step=step,
        epoch=0.5,
        loss=2.5,
        learning_rate=1e-4,
        grad_norm=1.0,
        tokens=1000,
        tokens_per_second=41_234.0,
        gpu_memory_used=gpu,
        memory_used=512_000_000,
    )


STARTED = TrainingStarted(
    time=100.0,
    attempt=1,
    step=0,
    max_steps=100,
    parameters=3_200_000,
    device="cpu",
    precision="fp32",
)


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize(
    ("event", "said"),
    [
        (StepStarted(stage="evaluate"), "evaluate: started"),
        (StepFinished(stage="train", summary="loss 2.5"), "train: done, loss 2.5"),
        (StepFinished(stage="preprocess", reused=True), "preprocess: reused"),
        (
            StepFailed(stage="train", error="X", message="no [red]space\nmore"),
            "train: failed: no [red]space",
        ),
        (
            AttemptStarted(
                attempt=2,
                world_size=2,
                batch=BatchSettings(4),
                gradient_accumulation_steps=8,
                resumed_from_step=1200,
            ),
            "attempt 2 starts from step 1,200, batch 4 (micro-batch) x 8 (accumulation) x 2",
        ),
        (
            AttemptStarted(
                attempt=1, world_size=1, batch=BatchSettings(4), gradient_accumulation_steps=8
            ),
            "attempt 1 starts from step 0",
        ),
        (
            AttemptEnded(
                attempt=1, outcome="failed", step=7, failure_class="gpu_oom", message="CUDA"
            ),
            "attempt 1 failed at step 7 (gpu_oom): CUDA",
        ),
        (AttemptEnded(attempt=1, outcome="early_stopped", step=7), "attempt 1 early stopped"),
        (DecisionMade(attempt=1, failure_class="x", action="stop", reason="why"), "stop: why"),
        (STARTED, "3.2M parameters, fp32 on cpu, 100 steps"),
        (
            Validated(attempt=1, step=50, epoch=1, metrics={"loss": 1.5}, best=True),
            "step 50 validated, loss 1.5000 (best)",
        ),
        (
            CheckpointSaved(attempt=1, step=50, checkpoint="c", bytes=12_000_000, seconds=0.25),
            "step 50 checkpoint saved, 12 MB in 0.2 s",
        ),
        (TrainingDiverged(attempt=1, step=9, loss=float("nan")), "diverged at step 9, loss nan"),
        (GradientOverflow(attempt=1, step=9, scale=65536.0), "overflowed at scale 65536"),
        (
            GradientOverflow(attempt=1, step=200, clipped=0.625, steps=100),
            "step 200: training.max_grad_norm clipped the gradients of 62% of the last 100 steps",
        ),
        (Warned(stage="train", message="MLflow is gone"), "train: MLflow is gone"),
    ],
)
def test_each_event_prints_a_line(event, said, terminal):
    assert said in shown(event, terminal=terminal)


def test_redundant_events_print_nothing():
    event = TrainingFinished(attempt=1, step=1, outcome="finished", best_step=1, best_score=1)
    assert shown(event) == ""


def test_level_is_spelled_out_without_a_terminal():
    assert shown(Warned(stage="train", message="slow")).startswith("warn: train: slow")


def test_step_reports_how_long_it_took():
    text = shown(StepStarted(stage="train", time=100.0), StepFinished(stage="train", time=285.0))
    assert "train: done (3 min 05 s)" in text


def test_training_shows_rate_time_left_and_memory():
    text = shown(STARTED, training_step(10, 120.0))
    line = text.splitlines()[-1]
    for part in ("step 10/100", "loss 2.5000", "41.2k tokens/s", "memory 512 MB", "3 min left"):
        assert part in line
    assert "memory 2 GB" in shown(STARTED, training_step(10, 120.0, gpu=2 * 10**9))


def test_display_that_starts_late_has_no_total():
    text = shown(training_step(10, 100.0), training_step(20, 120.0))
    assert "step 20," in text
    assert "left" not in text


def work(done, time, total=100.0, name="reading", unit="records"):
    return WorkProgress(time=time, stage="preprocess", work=name, done=done, total=total, unit=unit)


def test_work_shows_rate_and_time_left():
    text = shown(work(0, 100.0), work(20, 140.0))
    assert "preprocess: reading: 20/100 records, 0.5 records/s, 2 min 40 s left" in text


def test_work_in_bytes_is_shown_as_sizes():
    text = shown(work(0, 100.0, 3e6, unit="bytes"), work(1_500_000, 140.0, 3e6, unit="bytes"))
    assert "reading: 1.5 MB of 3 MB, 37.5 kB/s, 40 s left" in text


def test_work_without_a_known_end():
    assert "reading: 20 records, 0.5 records/s\n" in shown(
        work(0, 100.0, None), work(20, 140.0, None)
    )


def test_output_without_a_terminal_is_sparse_and_complete():
    ticks = [work(done, 100.0 + done / 10) for done in range(101)]
    lines = shown(*ticks).splitlines()
    assert len(lines) == 2
    assert "100/100" in lines[-1]


def test_terminal_bar_moves_and_disappears():
    text = shown(
        work(0, 100.0),
        work(20, 140.0),
        work(5, 150.0, name="packing"),
        StepFinished(stage="preprocess"),
        STARTED,
        training_step(10, 120.0),
        terminal=True,
    )
    for part in ("preprocess: reading", "preprocess: packing", "step 10/100"):
        assert part in text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (7, "7"),
        (0.25, "0.25"),
        (950, "950"),
        (9_500, "9,500"),
        (12_345, "12.3k"),
        (4.56e6, "4.56M"),
        (1.2e9, "1.2G"),
    ],
)
def test_amounts_have_units(number, text):
    assert amount(number) == text


def attempt(number, resumed=0):
    return AttemptStarted(
        attempt=number,
        world_size=1,
        batch=BatchSettings(4),
        gradient_accumulation_steps=8,
        resumed_from_step=resumed or None,
    )


FAILED = AttemptEnded(
    attempt=1, outcome="failed", step=57, failure_class="host_oom", message="it was killed\nmore"
)


def test_recovery_prints_what_why_and_what_changed_in_one_line():
    decided = DecisionMade(
        attempt=1, failure_class="host_oom", action="retry_changed", reason="4 x 8 becomes 2 x 16"
    )
    saved = CheckpointSaved(attempt=1, step=50, checkpoint="c", bytes=1, seconds=0.1)
    out = shown(attempt(1), STARTED, saved, FAILED, decided, attempt(2, 50), STARTED)
    assert out.splitlines()[-1] == (
        "warn: train: attempt 1 failed at step 57 (it was killed); retry changed from step 50: "
        "4 x 8 becomes 2 x 16"
    )
    assert len(out.splitlines()) == 4
    # The events after a recovery are shown again.
    again = shown(FAILED, decided, attempt(2, 50), STARTED, saved)
    assert "checkpoint saved" in again.splitlines()[-1]


def test_step_that_a_rank_repeats_is_a_warning():
    out = shown(attempt(1), STARTED, halved(size=2))
    assert out.splitlines()[-1] == "warn: train: repeat step: smaller micro-batch: 2"


def test_abandoned_run_says_why():
    decided = DecisionMade(attempt=1, failure_class="data", action="stop", reason="it would again")
    assert "; stop: it would again" in shown(FAILED, decided)


def test_failed_attempt_without_a_decision_is_still_reported():
    assert "attempt 1 failed at step 57 (host_oom)" in shown(FAILED)
    assert "attempt 1 failed" in shown(FAILED, StepFailed(stage="train", error="E", message="m"))


def test_progress_bar_continues_after_a_recovery():
    decided = DecisionMade(attempt=1, failure_class="hang", action="retry", reason="again")
    steps = [training_step(step, float(step)) for step in (1, 2)]
    out = shown(FAILED, decided, attempt(2), STARTED, *steps, terminal=True)
    assert f"/{STARTED.max_steps:,}" in out


@pytest.mark.parametrize("error", ["Stopped", "KeyboardInterrupt"])
def test_stopped_step_is_no_error(error):
    event = StepFailed(stage="train", error=error, message="stopped")
    assert shown(event) == "train: stopped\n"
    assert event.severity == "info"
    assert StepFailed(stage="train", error="TrainingFailed", message="x").severity == "error"

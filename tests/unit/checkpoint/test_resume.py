"""An interrupted run ends with the same weights as an uninterrupted run."""

from __future__ import annotations

import random
import shutil
import signal
import time

import numpy as np
import psutil
import pytest
import torch

from steadytrain.components.shared.events.types import TrainingStep, Validated
from steadytrain.components.train.attempt import AttemptFolder, AttemptResult
from steadytrain.components.train.checkpoint import Checkpoint, newest
from steadytrain.components.train.loop.setup import random_state, restore_random_state

from support.command import wait_for
from support.forked import ForkedLauncher, ForkedRanks
from support.pause import Pause
from support.training import GPT2, LLAMA, events_of, losses_of, weights_digest

LONG = {"max_steps": 90, "eval_steps": 15, "save_steps": 10, "micro_batch_size": 1}
DROPOUT = {**GPT2, "resid_pdrop": 0.2, "embd_pdrop": 0.1, "attn_pdrop": 0.1}


def wait_for_step(bench, process, step):
    """Wait until the run reports this step."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        if any(event.step >= step for event in events_of(bench.workspace, TrainingStep)):
            return
        if isinstance(process, ForkedRanks):
            assert not process.poll(), process.exits()
        else:
            assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    raise TimeoutError(step)


def ranks_of(process):
    return psutil.Process(process.pid).children(recursive=True)


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 3, 5])
def test_training_resumes_in_process_from_any_checkpoint(make_bench, step):
    """Compare every loss, score, and weight, including logging windows that the resume splits."""
    settings = {"training": {"save_steps": 1, "save_total_limit": 9, "logging_steps": 4}}
    settings |= {"model": {"config": DROPOUT}}
    undisturbed, resumed = make_bench("undisturbed", **settings), make_bench("resumed", **settings)
    undisturbed.train_here()

    resumed.train_here(1, resume_from=undisturbed.workspace.checkpoints / f"step-{step:08d}")

    assert weights_digest(resumed.workspace) == weights_digest(undisturbed.workspace)
    expected, found = losses_of(undisturbed.workspace), losses_of(resumed.workspace)
    assert found == {at: loss for at, loss in expected.items() if at > step}
    scores = [
        {event.step: event.metrics for event in events_of(bench.workspace, Validated)}
        for bench in (undisturbed, resumed)
    ]
    assert scores[1] == {at: metrics for at, metrics in scores[0].items() if at > step}


def test_resuming_a_finished_training_run_exports_it_again(make_bench):
    bench = make_bench()
    bench.train_here()
    first = weights_digest(bench.workspace)

    training = bench.train_here(2, resume_from=newest(bench.workspace.checkpoints))

    assert training.progress.step == 6
    assert weights_digest(bench.workspace) == first


@pytest.mark.slow
def test_patience_is_resumed(make_bench):
    settings = {
        "training": {
            "max_steps": 60,
            "learning_rate": 0.05,
            "lr_scheduler_type": "constant",
            "eval_steps": 2,
            "save_steps": 2,
            "save_total_limit": 90,
            "early_stopping_patience": 4,
        },
        "rows": 4,
    }
    undisturbed, resumed = make_bench("undisturbed", **settings), make_bench("resumed", **settings)
    stopped_at = undisturbed.train_here().progress.step
    start = undisturbed.workspace.checkpoints / f"step-{stopped_at - 4:08d}"
    # The best model's checkpoint must exist too.
    best = f"step-{Checkpoint.at(start).state()['progress']['best_step']:08d}"
    resumed.workspace.checkpoints.mkdir(parents=True)
    shutil.copytree(undisturbed.workspace.checkpoints / best, resumed.workspace.checkpoints / best)

    resumed.train_here(1, resume_from=start)

    assert weights_digest(resumed.workspace) == weights_digest(undisturbed.workspace)
    result = AttemptResult.load(AttemptFolder(resumed.workspace.folder / "attempts" / "1").result)
    assert (result.outcome, result.step) == ("early_stopped", stopped_at)


@pytest.mark.slow
def test_killed_and_resumed_run_has_the_weights_of_an_undisturbed_run(make_bench):
    """SIGKILL in the middle of the run, with dropout and 4 accumulation steps."""
    settings = {"training": LONG, "model": {"config": DROPOUT}}
    undisturbed, killed = make_bench("undisturbed", **settings), make_bench("killed", **settings)
    undisturbed.train_here()
    folder = AttemptFolder(killed.attempt(1))
    # However fast it is, it does not end before it is killed.
    pause = Pause(folder.path / "pause", 20)
    launcher = ForkedLauncher(**pause.environment)
    with launcher.start(folder) as running:
        wait_for(lambda: pause.pid() or running.poll())
        launcher.kill(0)
    assert launcher.ranks[0].exitcode == -signal.SIGKILL

    checkpoint = newest(killed.workspace.checkpoints)
    killed.train_here(2, resume_from=checkpoint)

    assert checkpoint is not None
    assert checkpoint.name < "step-00000090"
    assert weights_digest(killed.workspace) == weights_digest(undisturbed.workspace)
    assert losses_of(killed.workspace) == losses_of(undisturbed.workspace)


@pytest.mark.long
def test_sigterm_is_a_preemption_with_a_checkpoint(make_bench):
    settings = {"training": {**LONG, "max_steps": 100_000}, "model": {"config": LLAMA}}
    bench = make_bench(**settings)
    folder = bench.attempt(1)
    process = bench.start(folder)
    wait_for_step(bench, process, 3)
    process.send_signal(signal.SIGTERM)

    ended = bench.finish(process, folder)

    assert ended.code == 143, ended.output
    assert ended.result.outcome == "preempted"
    assert newest(bench.workspace.checkpoints).name == f"step-{ended.result.step:08d}"
    assert ended.result.model == ""
    assert not bench.workspace.model.exists()


TWO_RANKS = {
    "training": {**LONG, "max_steps": 60, "save_steps": 7},
    "model": {"config": DROPOUT},
    "compute": {"nproc_per_node": 2},
}


@pytest.mark.soak
def test_two_ranks_killed_and_resumed(make_bench):
    """Kill torchrun. No rank outlives it, and the resumed run ends with the same weights.

    The default test suite uses forked ranks instead (end_to_end/test_recovery.py), because they
    start faster.
    """
    undisturbed, killed = make_bench("undisturbed", **TWO_RANKS), make_bench("killed", **TWO_RANKS)
    assert undisturbed.run(ranks=2).code == 0
    process = killed.start(killed.attempt(1, ranks=2), ranks=2)
    wait_for_step(killed, process, 12)
    ranks = ranks_of(process)
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(ranks, timeout=300)
    assert (len(ranks), alive) == (2, [])

    checkpoint = newest(killed.workspace.checkpoints)
    assert killed.run(2, ranks=2, resume_from=checkpoint).code == 0

    assert weights_digest(killed.workspace) == weights_digest(undisturbed.workspace)
    assert losses_of(killed.workspace) == losses_of(undisturbed.workspace)


@pytest.mark.long
@pytest.mark.slow
def test_sigterm_to_one_rank_stops_all_ranks_at_one_step(make_bench):
    bench = make_bench(**{**TWO_RANKS, "training": {**LONG, "max_steps": 100_000}})
    folder = bench.attempt(ranks=2)
    process = bench.start(folder, ranks=2)
    wait_for_step(bench, process, 3)
    other = next(rank for rank in ranks_of(process) if rank.environ()["RANK"] == "1")
    other.send_signal(signal.SIGTERM)

    ended = bench.finish(process, folder)

    assert ended.result.outcome == "preempted"
    assert ended.folder.errors() == []
    assert newest(bench.workspace.checkpoints).name == f"step-{ended.result.step:08d}"


@pytest.mark.slow
def test_failing_rank_reports_why_and_hides_secrets(make_bench):
    bench = make_bench(task="support.faults:Bug")

    folder, launcher = AttemptFolder(bench.attempt()), ForkedLauncher(FAULT_STEP="3")
    with launcher.start(folder) as running:
        running.wait()

    assert launcher.exits == [{0: 1}]
    error = folder.errors()[0]
    assert (error.rank, error.kind, error.step) == (0, "KeyError", 1)
    assert "faults.py" in error.traceback
    assert "hf_" not in error.message + error.traceback
    assert not folder.result.exists()


def test_every_random_generator_is_restored():
    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item(), random.gauss(0, 1)

    draw()
    state = random_state()
    first = draw()
    restore_random_state(state)

    assert draw() == first


@pytest.mark.slow
def test_different_batch_split_continues_with_the_same_losses(make_bench):
    """Change 8x1 to 4x2, one rank to two, and two ranks to one.

    The sums are computed in another order, so the losses agree within 1e-6 (fp32, no dropout).
    """

    def bench(name, micro, ranks=1):
        training = {"global_batch_size": 8, "micro_batch_size": micro, "max_steps": 30}
        training |= {"eval_steps": 100, "save_steps": 10, "save_total_limit": 9}
        return make_bench(name, training=training, compute={"nproc_per_node": ranks})

    def losses(one, start):
        found = losses_of(one.workspace)
        return [found[step] for step in range(start + 1, start + 11)]

    def checkpoint(one, step):
        return one.workspace.checkpoints / f"step-{step:08d}"

    whole, cut, two, one = bench("8x1", 8), bench("4x2", 4), bench("two", 4, 2), bench("one", 8)
    whole.train_here()
    cut.train_here(resume_from=checkpoint(whole, 10))
    assert losses(cut, 10) == pytest.approx(losses(whole, 10), rel=1e-6)

    launcher = ForkedLauncher(2)
    folder = AttemptFolder(two.attempt(ranks=2, resume_from=checkpoint(whole, 10)))
    with launcher.start(folder) as running:
        running.wait()
    assert launcher.exits == [{0: 0, 1: 0}], folder.errors()
    assert losses(two, 10) == pytest.approx(losses(whole, 10), rel=1e-6)
    assert newest(two.workspace.checkpoints).manifest.world_size == 2

    one.train_here(resume_from=checkpoint(two, 20))
    assert losses(one, 20) == pytest.approx(losses(two, 20), rel=1e-6)


@pytest.mark.soak
@pytest.mark.parametrize("recomputing", [False, True])
def test_four_ranks_resume(make_bench, recomputing):
    """With more than two ranks, the order of a reduction may depend on DDP's buckets.

    Measured on four ranks (gloo), the weights are bit-identical. With activation checkpointing
    they are not: DDP then doesn't look for unused parameters, so it rebuilds its buckets after
    the first step, and a resumed run has one more first step. In that case, the losses agree.
    """
    settings = {
        "training": {
            "max_steps": 24,
            "save_steps": 12,
            "eval_steps": 100,
            "micro_batch_size": 1,
            "gradient_checkpointing": recomputing,
        },
        "compute": {"nproc_per_node": 4},
    }
    undisturbed, resumed = make_bench("undisturbed", **settings), make_bench("resumed", **settings)
    assert undisturbed.run(1, ranks=4).code == 0
    checkpoint = undisturbed.workspace.checkpoints / "step-00000012"

    assert resumed.run(1, ranks=4, resume_from=checkpoint).code == 0

    if not recomputing:
        assert weights_digest(resumed.workspace) == weights_digest(undisturbed.workspace)
    after = {step: loss for step, loss in losses_of(undisturbed.workspace).items() if step > 12}
    assert losses_of(resumed.workspace) == pytest.approx(after, rel=1e-6)

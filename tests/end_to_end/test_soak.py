"""A run under one fault after another, through the command, that reaches the undisturbed weights.

The faults include steps of the wall clock. It takes two minutes in the default tests and thirty
with `make soak`. The test prints its seed; set STEADYTRAIN_SOAK_SEED to repeat the same faults.
STEADYTRAIN_SOAK_MINUTES shortens the long tests.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import (
    AttemptStarted,
    DecisionMade,
    TrainingStep,
)
from steadytrain.components.shared.tracking import finish_run, use_tracking
from steadytrain.components.train import step
from steadytrain.components.train.agent.processes import processes_of
from steadytrain.components.train.recovery.history import State
from steadytrain.components.train.recovery.ledger import Ledger

from support.clocks import clock
from support.disturbances import DISTURBANCES, Program, Scene
from support.soak import Soak, schedule, table
from support.stores import empty_store, serving
from support.times import told_history
from support.training import (
    GPT2,
    Bench,
    events_of,
    language_rows,
    losses_of,
    weights_digest,
    write_data,
)

__all__ = ["clock", "empty_store"]

STEADYTRAIN = (sys.executable, "-m", "steadytrain.pipelines.cli")
TESTS = Path(__file__).parents[1]
DROPOUT = {**GPT2, "resid_pdrop": 0.2, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
GLOBAL_BATCH = 4
MINUTES = float(os.environ.get("STEADYTRAIN_SOAK_MINUTES", "30"))
ENDS = {
    "rank killed": "host_oom",  # the most common cause of SIGKILL
    "checkpoint damaged": "host_oom",
    "rank stopped": "hang",
    "supervisor killed": "node_lost",
}
DEADLINE = 4  # times the duration on an idle machine


@pytest.fixture(autouse=True)
def stoppable():
    """Treat SIGTERM like Ctrl-C, so that the fixtures clean up."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def draw():
    seed = int(os.environ.get("STEADYTRAIN_SOAK_SEED", time.time_ns() % 2**32))
    print(f"\nSTEADYTRAIN_SOAK_SEED={seed}")
    return random.Random(seed)


@pytest.fixture
def server(tmp_path, empty_store):
    with serving(tmp_path / "server", empty_store) as server:
        yield server


@pytest.fixture
def disturb(tmp_path, draw, server, clock, monkeypatch):
    """Train undisturbed, then under a plan's faults; return both workspaces."""
    monkeypatch.setenv("PYTHONPATH", f"{TESTS}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("PACE_FILE", str(tmp_path / "pace"))

    def run(plan, *, every, step_seconds, ranks, training, recovery, data, **sections):
        training = {
            "global_batch_size": GLOBAL_BATCH,
            "micro_batch_size": GLOBAL_BATCH // 2,
            "learning_rate": 1e-3,
            # More steps than the run can finish before the last fault.
            "max_steps": int(1.1 * (len(plan) + 1) * every / step_seconds),
            **training,
        }
        training.setdefault("eval_steps", training["max_steps"] // 4)
        sections["training"] = training
        sections["compute"] = {"device": "cpu", "nproc_per_node": ranks, "threads_per_rank": 1}

        def bench(name, task, **more):
            own = data.model_copy(update={"task": task})
            return Bench.make(tmp_path / "output", own, run=name, **sections, **more)

        undisturbed = bench("undisturbed", "causal_lm")
        assert step.run(undisturbed.config, undisturbed.data).succeeded

        disturbed = bench(
            "disturbed",
            "support.faults:Paced",
            recovery=recovery,
            tracking={"uri": server.uri},
        )
        workspace = disturbed.workspace
        workspace.create()
        workspace.config.write_text(disturbed.config.to_yaml())
        disturbed.data.save(workspace.record("preprocess"))
        accumulation = training["global_batch_size"] // training["micro_batch_size"] // ranks
        pace = tmp_path / "pace"
        pace.write_text(str(step_seconds / accumulation))
        program = Program(
            [*STEADYTRAIN, "step", "train", str(workspace.config)],
            tmp_path / "command.log",
            {**clock.environment, "OMP_NUM_THREADS": "1"},
        )
        scene = Scene(workspace, ranks, program, server, draw, clock)
        soak = Soak(scene, plan, every, pace)
        status = soak.run(DEADLINE * (len(plan) + 2) * every + 600)
        print(table(scene, soak.struck))
        assert status == 0, program.log.read_text()[-4000:]
        assert not soak.plan, "it ended before the last fault"
        assert not processes_of(workspace.attempts)
        assert_told(disturbed)
        assert_recovered(scene, soak.struck)
        assert_recorded_once(workspace)
        return undisturbed.workspace, workspace

    return run


def assert_told(bench):
    """Assert that the tracking server has each point exactly once, whatever happened to it."""
    assert finish_run(bench.config, bench.workspace, ok=True)
    tracking = use_tracking(bench.config, bench.workspace)
    attempts = {event.attempt for event in events_of(bench.workspace, AttemptStarted)}
    found = {}
    for run in tracking.client.search_runs([tracking.experiment_id]):
        if run.info.run_name.startswith("attempt-"):
            history = tracking.client.get_metric_history(run.info.run_id, "loss")
            found[run.info.run_name] = sorted((point.step, point.value) for point in history)
    assert found == {
        f"attempt-{attempt}": [
            (event.step, event.loss)
            for event in events_of(bench.workspace, TrainingStep)
            if event.attempt == attempt
        ]
        for attempt in attempts
    }


def assert_recovered(scene, struck):
    """Assert that each fault that should end an attempt did, with the expected failure class."""
    attempts = {
        attempt.started.attempt: attempt for attempt in told_history(scene.workspace).attempts
    }
    for fault in struck:
        if fault.name in ENDS:
            ended = attempts[fault.attempt].ended
            assert ended.failure_class == ENDS[fault.name], (fault, ended)
    assert [number for number, attempt in attempts.items() if not attempt.ended.failure_class] == [
        len(attempts)
    ]
    for number, damaged in scene.damaged.items():
        after = attempts[number + 1]
        if after.started.resumed_from_step == damaged:
            # Names and sizes were right, so only the ranks could find the damage.
            assert after.ended.failure_class == "checkpoint_corrupt"
            after = attempts[number + 2]
        assert (after.started.resumed_from_step or 0) < damaged


def assert_recorded_once(workspace):
    """Assert that the ledger and the events agree, whatever the clocks showed."""
    history = Ledger(workspace).history()
    told = [repr(event) for event in read_events(workspace.events) if isinstance(event, State)]
    assert len(set(told)) == len(told)
    kept = [item for attempt in history.attempts for item in attempt.checkpoints]
    kept += [item.ended for item in history.attempts] + history.decisions
    assert {repr(event) for event in kept} <= set(told)


def small_data(folder):
    return write_data(folder, language_rows(60), language_rows(8, seed=1))


@pytest.mark.long
def test_run_survives_one_fault_of_each_kind(disturb, draw, tmp_path):
    undisturbed, disturbed = disturb(
        schedule(draw, DISTURBANCES, len(DISTURBANCES)),
        every=12,
        step_seconds=0.2,
        ranks=1,
        # A busy machine needs longer for a restart than the faults are apart.
        training={"save_steps": 8, "logging_steps": 1, "max_steps": 1000},
        recovery={"hang_timeout_seconds": 15, "backoff_seconds": 0.5},
        data=small_data(tmp_path / "data"),
        model={"config": DROPOUT},
    )
    assert weights_digest(disturbed) == weights_digest(undisturbed)
    assert losses_of(disturbed) == losses_of(undisturbed)


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_two_ranks_survive_a_fault_each_minute(disturb, draw, tmp_path):
    """The product's defaults, except for the hang timeout."""
    undisturbed, disturbed = disturb(
        schedule(draw, DISTURBANCES, int(MINUTES)),
        every=60,
        step_seconds=0.25,
        ranks=2,
        training={"logging_steps": 10, "micro_batch_size": 1},
        recovery={"hang_timeout_seconds": 20},
        data=small_data(tmp_path / "data"),
        model={"config": DROPOUT},
    )
    assert weights_digest(disturbed) == weights_digest(undisturbed)
    assert losses_of(disturbed) == losses_of(undisturbed)


LENGTH = 160
WIDE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 4096,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": LENGTH,
}


def long_data(folder):
    """Return rows long enough that a micro-batch of 8 needs about 100 MB of activations."""
    rows = language_rows(60)
    for row in rows:
        times = LENGTH // len(row["input_ids"])
        for name in ("input_ids", "targets", "lengths"):
            row[name] = row[name] * times
    return write_data(folder, rows, [], sequence_length=LENGTH)


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_run_survives_oom_among_other_faults(disturb, draw, tmp_path):
    undisturbed, disturbed = disturb(
        schedule(draw, DISTURBANCES, int(MINUTES), memory=2),
        every=60,
        step_seconds=1.0,
        ranks=1,
        training={
            "global_batch_size": 8,
            "micro_batch_size": 8,
            "learning_rate": 1e-4,
            "logging_steps": 1,
        },
        recovery={"hang_timeout_seconds": 30},
        data=long_data(tmp_path / "data"),
        model={"config": WIDE},
    )
    decisions = [event for event in events_of(disturbed, DecisionMade) if event.fallback]
    # At least two reductions: a later rank may use more address space between its steps and hit the
    # limit again.
    sizes = [event.batch.micro_batch_size for event in decisions]
    assert sizes in ([4, 2], [4, 2, 1])
    assert {event.fallback for event in decisions} == {"smaller micro-batch"}
    sizes = [event.batch.micro_batch_size for event in events_of(disturbed, AttemptStarted)]
    assert sizes == sorted(sizes, reverse=True)
    found, expected = losses_of(disturbed), losses_of(undisturbed)
    assert found.keys() == expected.keys()
    apart = max(abs(found[number] / expected[number] - 1) for number in expected)
    print(f"largest difference of a loss: {apart:.1e} of it, over {len(expected)} steps")
    assert found == pytest.approx(expected, rel=1e-5)

"""Out of memory in a rank: its allocator raises, under a real limit on the process."""

from __future__ import annotations

import numpy as np
import pytest

from steadytrain.components.report.explain import explain
from steadytrain.components.shared.events.types import (
    AttemptEnded,
    AttemptStarted,
    DecisionMade,
    TrainingStep,
    Warned,
)
from steadytrain.components.train.attempt import AttemptFolder

from support.forked import ForkedLauncher, train
from support.training import (
    Bench,
    events_of,
    losses_of,
    packed_row,
    weights_digest,
    write_data,
)

WIDE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 4096,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": 64,
}
LARGE_BATCHES = {"max_steps": 3, "global_batch_size": 8, "logging_steps": 1}


@pytest.fixture
def bench(tmp_path, long_data):
    def make(run, *, ranks=1, data=long_data, strategy="auto", **sections):
        compute = {
            "device": "cpu",
            "nproc_per_node": ranks,
            "threads_per_rank": 1,
            "strategy": strategy,
        }
        recovery = {"backoff_seconds": 0, **sections.pop("recovery", {})}
        return Bench.make(
            tmp_path / "output", data, run=run, compute=compute, recovery=recovery, **sections
        )

    return make


@pytest.fixture(scope="module")
def long_data(tmp_path_factory):
    """Return rows long enough that a micro-batch of 8 needs several hundred MB of activations."""
    rows = [packed_row([48] * 8, np.random.default_rng(seed)) for seed in range(24)]
    return write_data(tmp_path_factory.mktemp("long"), rows, [], sequence_length=384)


@pytest.mark.core
def test_one_rank_halves_in_place_and_the_next_run_starts_there(bench):
    def run(name, micro, *, limit=0):
        one = bench(
            name,
            # Half the micro-batch saves 300 MB.
            model={"config": {**WIDE, "hidden_size": 16, "intermediate_size": 8192}},
            training={**LARGE_BATCHES, "max_steps": 2, "micro_batch_size": micro},
        )
        launcher = ForkedLauncher(ADDRESS_SPACE=str(limit))
        return one.workspace, train(one, launcher=launcher)

    def peak(workspace):
        return int((workspace.attempts / "0001" / "peak").read_text())

    undisturbed, outcome = run("undisturbed", 8)
    assert outcome.succeeded
    half, outcome = run("half", 4)
    assert outcome.succeeded
    assert peak(half) < peak(undisturbed)
    between = (peak(half) + peak(undisturbed)) // 2

    short, outcome = run("short", 8, limit=between)
    assert (outcome.outcome, outcome.attempts) == ("finished", 1), outcome
    assert [item.batch.micro_batch_size for item in events_of(short, AttemptStarted)] == [8]
    (decision,) = events_of(short, DecisionMade)
    assert (decision.action, decision.fallback) == ("repeat_step", "smaller micro-batch")
    assert "DefaultCPUAllocator" in decision.reason
    assert losses_of(short) == pytest.approx(losses_of(undisturbed), rel=1e-6)
    assert weights_digest(short) == weights_digest(half), "no step was done with micro-batch 8"

    later, outcome = run("later", 8, limit=between)
    assert (outcome.outcome, outcome.attempts) == ("finished", 1)
    assert events_of(later, AttemptStarted)[0].batch.micro_batch_size == 4
    (warned,) = events_of(later, Warned)
    assert "training.micro_batch_size = 8 is an upper bound" in warned.message
    assert len(events_of(later, TrainingStep)) == 2


@pytest.mark.long
def test_run_survives_with_shorter_sequences_where_nothing_else_helps(bench, tmp_path):
    """The limit is real, and only the configuration that allows shorter sequences trains."""
    rows = [packed_row([64] * 48, np.random.default_rng(seed)) for seed in range(8)]
    data = write_data(tmp_path / "data", rows, [], sequence_length=3072)

    model = {
        **WIDE,
        "hidden_size": 16,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
    }

    def run(name, *, limit=0, **recovery):
        one = bench(
            name,
            data=data,
            model={"config": model},
            training={
                "max_steps": 2,
                "global_batch_size": 2,
                "micro_batch_size": 1,
                "gradient_checkpointing": True,
                "logging_steps": 1,
            },
            recovery=recovery,
        )
        launcher = ForkedLauncher(ADDRESS_SPACE=str(limit))
        return one.workspace, train(one, launcher=launcher)

    undisturbed, outcome = run("undisturbed")
    assert outcome.succeeded, outcome.failure
    limit = int((undisturbed.attempts / "0001" / "peak").read_text()) - (128 << 20)

    kept, outcome = run("kept", limit=limit)
    assert outcome.outcome == "failed"
    (decision,) = events_of(kept, DecisionMade)
    assert "no OOM fallback is left" in decision.reason

    short, outcome = run("short", limit=limit, min_sequence_length=64)
    assert (outcome.outcome, outcome.attempts) == ("finished", 2), outcome
    (decision,) = events_of(short, DecisionMade)
    assert (decision.fallback, decision.batch.sequence_length) == ("shorter sequences", 1536)
    assert "DefaultCPUAllocator" in events_of(short, AttemptEnded)[0].message
    told = [event.message for event in events_of(short, Warned)]
    assert any("at most 1,536 tokens instead of 3,072" in message for message in told)
    # No document is longer than that, so the same targets are learned.
    assert losses_of(short) == pytest.approx(losses_of(undisturbed), rel=1e-5)
    assert "sequences were shortened: gpu_oom: shorter sequences" in "\n".join(explain(short))


PHASES = ["forward:0", "backward:1", "optimizer:1", "forward:1"]


@pytest.fixture
def run_out(bench, long_data):
    """Run two ranks that run out of memory as planned; return the workspace and the launcher."""

    def run(name, *faults, strategy="auto", config=WIDE, **training):
        one = bench(
            name,
            ranks=2,
            data=long_data.model_copy(update={"task": "support.faults:RunsOut"}),
            model={"config": config},
            training={**LARGE_BATCHES, **training},
            strategy=strategy,
        )
        launcher = ForkedLauncher(2, FAULTS=" ".join(faults))
        outcome = train(one, launcher=launcher)
        assert outcome.succeeded, outcome
        return one.workspace, launcher

    return run


@pytest.mark.long
def test_oom_on_one_of_two_ranks_in_each_phase_of_a_step(run_out):
    """All ranks exit by themselves; the losses are unchanged."""
    large = {"config": {**WIDE, "hidden_size": 128}, "micro_batch_size": 4, "max_steps": 2}
    undisturbed, _ = run_out("undisturbed", **large)
    short, launcher = run_out("short", *PHASES, **large)
    begun = events_of(short, AttemptStarted)
    batches = [item.batch for item in begun]
    assert [batch.micro_batch_size for batch in batches] == [4, 2, 1, 1, 1]
    assert [batch.gradient_checkpointing for batch in batches] == [False] * 3 + [True] * 2
    assert [batch.strategy for batch in batches] == ["ddp"] * 4 + ["fsdp"]
    ended = events_of(short, AttemptEnded)
    assert [item.failure_class for item in ended] == ["gpu_oom"] * 4 + [""]
    assert launcher.exits[:4] == [{0: 1, 1: 1}] * 4, "nobody had to be killed"
    for number, fault in enumerate(PHASES):
        errors = AttemptFolder(short.attempts / f"{number + 1:04d}").errors()
        (root,) = [error for error in errors if "DefaultCPUAllocator" in error.message]
        assert root.rank == int(fault[-1])
        assert root.memory_needed > 0
        assert fault.partition(":")[0] in root.traceback or "loss" in root.traceback
    assert losses_of(short) == pytest.approx(losses_of(undisturbed), rel=1e-6)
    rates = [
        {event.step: event.learning_rate for event in events_of(workspace, TrainingStep)}
        for workspace in (undisturbed, short)
    ]
    assert rates[0] == rates[1]


@pytest.mark.long
def test_deepspeed_runs_fall_back_through_its_stages(run_out):
    """Each fallback resumes from the previous stage's checkpoint and reshards the weights."""
    small = {"strategy": "zero1", "micro_batch_size": 1, "gradient_checkpointing": True}
    undisturbed, _ = run_out("undisturbed", **small)
    short, _ = run_out("short", "forward:0", "backward:1", **small)
    begun = events_of(short, AttemptStarted)
    assert [item.batch.strategy for item in begun] == ["zero1", "zero2", "zero3"]
    fallbacks = [item.fallback for item in events_of(short, DecisionMade)]
    assert fallbacks == ["DeepSpeed ZeRO-2", "DeepSpeed ZeRO-3"]
    assert losses_of(short) == pytest.approx(losses_of(undisturbed), rel=1e-4)

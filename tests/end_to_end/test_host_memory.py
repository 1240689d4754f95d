"""The host's memory runs out: the kernel kills a rank, and the run goes on with less."""

from __future__ import annotations

import pytest

from steadytrain.components.shared.events.types import AttemptEnded, AttemptStarted, DecisionMade
from steadytrain.components.train.launch.process import ProcessLauncher
from steadytrain.components.train.recovery.supervisor import Supervisor

from support.limited_group import limited_group
from support.training import Bench, events_of, language_rows, losses_of, write_data

LENGTH, VOCABULARY = 384, 16_000
MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": VOCABULARY,
}
LARGER = 8


class Grouped(ProcessLauncher):
    """Starts what it starts in a control group."""

    def __init__(self, compute, group):
        super().__init__(compute)
        self.group = group

    def _command(self, folder):
        return self.group.inside(super()._command(folder))


@pytest.fixture
def data(tmp_path):
    rows = language_rows(24)
    for row in rows:
        times = LENGTH // len(row["input_ids"])
        for name in ("input_ids", "targets", "lengths"):
            row[name] = row[name] * times
    return write_data(tmp_path / "data", rows, [], sequence_length=LENGTH)


@pytest.mark.slow
def test_the_kernel_kills_a_rank_and_the_run_goes_on_with_a_smaller_micro_batch(tmp_path, data):
    def run(name, micro, *, share=0.0):
        """One run in a group whose limit lies by that share of the logits above the first's."""
        bench = Bench.make(
            tmp_path / "output",
            data,
            run=name,
            model={"config": MODEL},
            training={
                "max_steps": 2,
                "global_batch_size": LARGER,
                "micro_batch_size": micro,
                "logging_steps": 1,
            },
            compute={"device": "cpu", "threads_per_rank": 1},
            recovery={"backoff_seconds": 0, "breaker_reset_seconds": 0},
        )
        with limited_group() as group:
            if share:
                group.limit(peaks[0] + int(share * LARGER / 2 * LENGTH * VOCABULARY * 4))
            outcome = Supervisor(bench.config, data, Grouped(bench.config.compute, group)).run()
            peaks.append(group.peak)
        assert outcome.succeeded, outcome
        return bench.workspace

    peaks: list[int] = []
    half = run("half", LARGER // 2)
    # Twice the micro-batch needs at least one more set of logits than the smaller one has.
    short = run("short", LARGER, share=0.8)

    begun = events_of(short, AttemptStarted)
    assert [item.micro_batch_size for item in begun] == [LARGER, LARGER // 2]
    ended = events_of(short, AttemptEnded)[0]
    assert ended.failure_class == "host_oom"
    assert "control group" in ended.message
    (decision,) = events_of(short, DecisionMade)
    assert (decision.action, decision.rung) == ("retry_changed", "smaller micro-batch")
    assert losses_of(short) == pytest.approx(losses_of(half), rel=1e-6)

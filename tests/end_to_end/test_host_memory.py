"""Out of host memory: the kernel kills a rank, and the run continues with less."""

from __future__ import annotations

import pytest

from steadytrain.components.shared.events.types import (
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    DecisionMade,
    TrainingStep,
)
from steadytrain.components.train.launch.process import ProcessLauncher
from steadytrain.components.train.recovery.supervisor import Supervisor

from support.limited_group import limited_group
from support.pause import Pause
from support.training import (
    Bench,
    events_of,
    language_rows,
    losses_of,
    weights_digest,
    write_data,
)

LENGTH, INNER = 384, 4096
LIGHT = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
}
HEAVY = {**LIGHT, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 5}
LARGER = 8


class Grouped(ProcessLauncher):
    """A launcher whose agent, with all that it forks, is in a control group."""

    def __init__(self, compute, group):
        super().__init__(compute)
        self.group = group

    def _new_agent(self, log):
        agent = super()._new_agent(log)
        self.group.add(agent.pid)
        return agent


@pytest.fixture
def data(tmp_path):
    rows = language_rows(24)
    for row in rows:
        times = LENGTH // len(row["input_ids"])
        for name in ("input_ids", "targets", "lengths"):
            row[name] = row[name] * times
    return write_data(tmp_path / "data", rows, [], sequence_length=LENGTH)


@pytest.fixture
def train(tmp_path):
    """Return a function that runs in a control group and returns the workspace."""

    def run(name, data, group, model, *, sinks=(), **training):
        bench = Bench.make(
            tmp_path / "output",
            data,
            run=name,
            model={"config": model},
            training={"global_batch_size": LARGER, "logging_steps": 1, **training},
            compute={"device": "cpu", "threads_per_rank": 1},
            recovery={"backoff_seconds": 0, "breaker_reset_seconds": 0},
        )
        with Grouped(bench.config.compute, group) as launcher:
            outcome = Supervisor(bench.config, data, launcher, sinks=sinks).run()
        assert outcome.succeeded, outcome
        return bench.workspace

    return run


class Weighs:
    """Records a group's memory after steps, once a run has a snapshot in memory.

    The rank is paused after each step until that is done.
    """

    def __init__(self, group, pause):
        self.group, self.pause, self.saved, self.held = group, pause, False, []

    def emit(self, event):
        self.saved |= isinstance(event, CheckpointSaved)
        if isinstance(event, TrainingStep):
            if self.saved:
                self.held.append(self.group.anonymous)
            self.pause.set(event.step + 1)

    def close(self):
        pass


@pytest.mark.long
def test_checkpoints_skip_a_snapshot_that_does_not_fit(tmp_path, train, monkeypatch):
    """Weights take w, gradients w, AdamW's moments 2 w, and the snapshot 3 w.

    The limit is the memory in use between two steps with a snapshot. That is more than a step needs
    without a snapshot, and less than a step needs with one.
    """
    data = write_data(tmp_path / "data", language_rows(24), [])
    recipe = {"max_steps": 6, "micro_batch_size": LARGER, "save_steps": 2}
    pause = Pause(tmp_path / "pause", 0, "TrainingStep")
    pause.set_everywhere(monkeypatch)
    with limited_group() as group:
        weighs = Weighs(group, pause)
        plenty = train("plenty", data, group, HEAVY, sinks=[weighs], **recipe)
    with limited_group() as group:
        group.limit(min(weighs.held))
        short = train("short", data, group, HEAVY, **recipe)

    killed, ended = events_of(short, AttemptEnded)
    assert (killed.failure_class, ended.outcome) == ("host_oom", "finished")
    assert "control group" in killed.message
    (decision,) = events_of(short, DecisionMade)
    assert decision.fallback == "no snapshot in host memory"
    begun = [item.batch for item in events_of(short, AttemptStarted)]
    assert [(item.snapshot, item.micro_batch_size) for item in begun] == [(True, 8), (False, 8)]
    in_place = [item for item in events_of(short, CheckpointSaved) if item.attempt == 2]
    assert {item.step for item in in_place} >= {4, 6}
    # Training was blocked while they were written.
    assert all(item.seconds > item.writing_seconds / 2 for item in in_place)
    assert weights_digest(short) == weights_digest(plenty)


@pytest.mark.soak
def test_micro_batch_halves_until_the_kernel_stops_killing_the_rank(data, train):
    model = {**LIGHT, "intermediate_size": INNER}
    with limited_group() as group:
        half = train("half", data, group, model, max_steps=2, micro_batch_size=LARGER // 2)
        enough = group.peak
    with limited_group() as group:
        train("whole", data, group, model, max_steps=2, micro_batch_size=LARGER)
        needed = group.peak
    with limited_group() as group:
        group.limit((enough + needed) // 2)
        short = train("short", data, group, model, max_steps=2, micro_batch_size=LARGER)

    begun = events_of(short, AttemptStarted)
    assert [item.batch.micro_batch_size for item in begun] == [LARGER, LARGER, LARGER // 2]
    assert [item.failure_class for item in events_of(short, AttemptEnded)] == [
        "host_oom",
        "host_oom",
        "",
    ]
    fallbacks = [decision.fallback for decision in events_of(short, DecisionMade)]
    assert fallbacks == ["no snapshot in host memory", "smaller micro-batch"]
    assert losses_of(short) == pytest.approx(losses_of(half), rel=1e-6)

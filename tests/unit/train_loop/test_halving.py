"""Out of memory on one rank: it halves its micro-batch and repeats the step in its process."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.events.types import DecisionMade, TrainingStep
from steadytrain.components.train.attempt import AttemptFolder, AttemptSpec
from steadytrain.components.train.loop import halving, setup
from steadytrain.components.train.loop.main import Rank

from support.training import GPT2, events_of, losses_of, weights_digest

FREELB = {"kind": "freelb", "epsilon": 0.1, "steps": 2}
ENDS = "ends the attempt"


@pytest.fixture
def exhausted(make_bench, monkeypatch):
    """Return a function that makes a run whose memory runs out at step 4, in micro-batch 2."""

    def make(name="run", *, phase="forward", **training):
        training = {"global_batch_size": 8, "micro_batch_size": 4, "save_steps": 3, **training}
        passes = training.get("adversarial", {}).get("steps", 1)
        micro_batches = training["global_batch_size"] // training["micro_batch_size"]
        monkeypatch.setenv("FAULT_PHASE", phase)
        monkeypatch.setenv("FAULT_STEP", str((3 * micro_batches + 2) * passes))
        task, model = "support.faults:Exhausted", {"config": GPT2}
        return make_bench(name, task=task, model=model, training=training)

    return make


def add_scaler(monkeypatch):
    """Use PyTorch's own loss scaler on the CPU. float16 itself needs a GPU."""
    make = setup.make_accelerator

    def scaled(config, **options):
        accelerator = make(config, **options)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        return accelerator

    monkeypatch.setattr(setup, "make_accelerator", scaled)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "scaled", "training"),
    [
        (
            "forward",
            False,
            {
                "averaging": {"kind": "ema", "decay": 0.9},
                "monitor": {"layers": True, "every_steps": 1},
                "lr_scheduler_type": "reduce_lr_on_plateau",
            },
        ),
        ("forward", False, {"adversarial": FREELB}),
        ("backward", False, {"bf16": True, "gradient_checkpointing": True}),
        ("backward", True, {"r_drop": {"weight": 1.0}}),
    ],
)
def test_repeated_step_equals_a_restart_right_before_it(
    exhausted, monkeypatch, phase, scaled, training
):
    """To the bit: the losses, and the weights after dropout."""
    if scaled:
        add_scaler(monkeypatch)
    bench = exhausted(phase=phase, **training)
    trained = bench.train_here()

    workspace = bench.workspace
    (decision,) = events_of(workspace, DecisionMade)
    assert (decision.attempt, decision.failure_class) == (1, "gpu_oom")
    assert (decision.action, decision.fallback) == ("repeat_step", "smaller micro-batch")
    assert "the global batch stays 8; step 4 is repeated after OutOfMemory" in decision.reason
    recompute = training.get("gradient_checkpointing", False)
    smaller = BatchSettings(2, gradient_checkpointing=recompute)
    assert decision.batch == trained.parts.batch == smaller
    steps = [event.step for event in events_of(workspace, TrainingStep)]
    assert steps == [1, 2, 3, 4, 5, 6], "no step was trained twice"

    restarted = exhausted("restarted", **training)
    folder = restarted.attempt(resume_from=workspace.checkpoints / "step-00000003")
    spec = AttemptFolder(folder).spec
    changed = {"batch": smaller, "gradient_accumulation_steps": 4}
    AttemptSpec.load(spec).model_copy(update=changed).save(spec)
    monkeypatch.setenv("FAULT_STEP", "0")
    Rank(AttemptFolder(folder)).run()
    assert weights_digest(restarted.workspace) == weights_digest(workspace)
    losses = losses_of(workspace)
    assert losses_of(restarted.workspace) == {step: losses[step] for step in (4, 5, 6)}


@pytest.mark.parametrize(
    ("phase", "training"),
    [
        ("optimizer", {}),
        ("forward", {"micro_batch_size": 1}),
        ("forward", {"monitor": {"noise_scale": True}}),
        ("forward", ENDS),
    ],
)
def test_attempt_ends_where_a_step_cannot_be_repeated(exhausted, monkeypatch, phase, training):
    """In the update, without a smaller micro-batch, and if failed passes leave something behind."""
    if training == ENDS:
        # A model with batch normalization, for example.
        monkeypatch.setattr(halving, "learns_in_buffers", lambda _: True)
        training = {}
    bench = exhausted(phase=phase, **training)
    with pytest.raises(torch.OutOfMemoryError):
        bench.train_here()
    assert events_of(bench.workspace, DecisionMade) == []
    assert [event.step for event in events_of(bench.workspace, TrainingStep)] == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize(("times", "steps"), [(2, 6), (3, 3)])
def test_micro_batch_halves_until_the_step_fits(exhausted, monkeypatch, times, steps):
    bench = exhausted()
    monkeypatch.setenv("FAULT_TIMES", str(times))
    with nullcontext() if steps == 6 else pytest.raises(torch.OutOfMemoryError):
        bench.train_here()
    found = events_of(bench.workspace, DecisionMade)
    assert [item.batch.micro_batch_size for item in found] == [2, 1]
    assert [event.step for event in events_of(bench.workspace, TrainingStep)][-1] == steps

"""Full training runs in this process: reports, validation, the best model, and failures."""

from __future__ import annotations

import contextlib
import math
from dataclasses import asdict
from itertools import accumulate

import pytest
import torch
import torch._dynamo.utils

from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.config.fields import Decision
from steadytrain.components.shared.errors import BadInput, RunBusy, StorageError
from steadytrain.components.shared.events.types import (
    CheckpointSaved,
    GradientOverflow,
    TrainingDiverged,
    TrainingFinished,
    TrainingStarted,
    TrainingStep,
    Validated,
    Warned,
)
from steadytrain.components.shared.lease import hold
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.train.attempt import AttemptFolder, AttemptSpec
from steadytrain.components.train.checkpoint.store import CheckpointStore, committed
from steadytrain.components.train.failures import CannotRecompute, Diverged
from steadytrain.components.train.loop import reporter
from steadytrain.components.train.loop.main import Rank

from support.training import GPT2, events_of, exported, losses_of, result_of, weights_digest


def test_training_run_reports_what_it_does(make_bench):
    bench = make_bench()

    training = bench.train_here()

    workspace = bench.workspace
    started = events_of(workspace, TrainingStarted)[0]
    assert (started.step, started.max_steps, started.precision) == (0, 6, "fp32")
    assert started.parameters == sum(item.numel() for item in training.parts.module.parameters())
    steps = events_of(workspace, TrainingStep)
    assert [event.step for event in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[-1].loss < steps[0].loss
    assert steps[0].loss == pytest.approx(math.log(64), rel=0.05)
    assert steps[-1].epoch == pytest.approx(6 * 4 / 40)
    seen = training.parts.order.take(0, 24)
    assert steps[-1].tokens == sum(len(training.parts.train[index]["input_ids"]) for index in seen)
    assert all(event.grad_norm > 0 and event.tokens_per_second > 0 for event in steps)
    assert all(event.memory_used > 1e7 and event.gpu_memory_used == 0 for event in steps)
    assert [event.step for event in events_of(workspace, Validated)] == [3, 6]
    assert [event.step for event in events_of(workspace, CheckpointSaved)] == [3, 6]
    finished = events_of(workspace, TrainingFinished)[0]
    result = result_of(bench)
    assert result.outcome == finished.outcome == "finished"
    assert result.best_step == finished.best_step == 6
    assert result.best_score == events_of(workspace, Validated)[-1].metrics["loss"]
    assert (result.metric, result.model) == ("loss", str(workspace.model))


@pytest.mark.slow
def test_reported_loss_is_the_mean_since_the_last_report(make_bench):
    each, every_third = make_bench("each"), make_bench("third", training={"logging_steps": 3})
    for bench in (each, every_third):
        bench.train_here()
    parts = make_bench("weights").train_here().parts
    single, triple = losses_of(each.workspace), losses_of(every_third.workspace)

    weights = [
        sum(int(parts.train[index]["targets"].sum()) for index in parts.order.take(step * 4, 4))
        for step in range(3)
    ]

    assert list(triple) == [3, 6]
    expected = sum(single[step + 1] * weights[step] for step in range(3)) / sum(weights)
    assert triple[3] == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
def test_micro_batches_change_only_rounding(make_bench):
    found = []
    for micro in (1, 2, 4):
        bench = make_bench(f"micro-{micro}", training={"micro_batch_size": micro})
        bench.train_here()
        found.append(losses_of(bench.workspace))

    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[0] == pytest.approx(found[2], rel=1e-5)


@pytest.mark.slow
def test_equal_runs_are_equal_and_other_seeds_differ(make_bench):
    digests = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        bench = make_bench(name, training={"seed": seed}, model={"config": GPT2})
        bench.train_here()
        digests.append(weights_digest(bench.workspace))

    assert digests[0] == digests[1] != digests[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"bf16": True},
        {"gradient_checkpointing": True},
        {"max_grad_norm": 0},
    ],
    ids=lambda item: next(iter(item)),
)
def test_other_training_options_learn_the_same(make_bench, settings):
    plain, other = make_bench("plain"), make_bench("other", training=settings)
    plain.train_here()
    other.train_here()

    plain_losses, losses = losses_of(plain.workspace), losses_of(other.workspace)
    assert losses == pytest.approx(plain_losses, rel=0.02)
    started = events_of(other.workspace, TrainingStarted)[0]
    assert started.precision == ("bf16" if "bf16" in settings else "fp32")
    assert {item.dtype for item in exported(other).values()} == {torch.float32}


@pytest.mark.long
def test_compiled_layers_learn_the_same_and_resume_bit_for_bit(make_bench):
    """Rows differ in length: the resumed run starts with a different length than the first."""
    plain = make_bench("plain")
    plain.train_here()
    training = {"torch_compile": True, "save_steps": 2, "gradient_checkpointing": True}
    torch._dynamo.reset()
    whole = make_bench("whole", training=training)
    trained = whole.train_here()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert not events_of(whole.workspace, Warned)
    assert losses_of(whole.workspace) == pytest.approx(losses_of(plain.workspace), rel=1e-5)
    assert all("_orig_mod" not in name for name in trained.parts.module.state_dict())

    torch._dynamo.reset()
    again = make_bench("again", training=training)
    again.train_here(resume_from=whole.workspace.checkpoints / "step-00000004")
    assert weights_digest(again.workspace) == weights_digest(whole.workspace)


def test_deterministic_mode_trains(make_bench):
    bench = make_bench(training={"full_determinism": True})
    try:
        bench.train_here()
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"training": {"metric_for_best_model": "accuracy", "greater_is_better": True}},
            "the task has no such metric",
        ),
        # A task that does not declare its metrics is asked for them.
        (
            {
                "task": "support.faults:NotANumber",
                "training": {"metric_for_best_model": "accuracy", "greater_is_better": True},
            },
            "the task has no such metric",
        ),
        ({"training": {"fp16": True}, "compute": {"device": "cpu"}}, "that needs a CUDA device"),
    ],
)
def test_bad_settings_are_rejected_before_the_first_step(make_bench, sections, message):
    bench = make_bench(**sections)

    with pytest.raises(BadInput, match=message) as error:
        bench.train_here()

    assert error.value.remedy
    assert events_of(bench.workspace, TrainingStep) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_missing_device_is_rejected(make_bench):
    with pytest.raises(BadInput, match="finds no CUDA device"):
        make_bench(compute={"device": "cuda"}).train_here()


@pytest.mark.parametrize("kind", ["NotANumber", "InfiniteGradient"])
def test_divergence_fails_at_its_step_and_commits_nothing(make_bench, monkeypatch, kind):
    bench = make_bench(
        task=f"support.faults:{kind}",
        training={"micro_batch_size": 4, "save_steps": 1, "eval_steps": 2},
    )
    monkeypatch.setenv("FAULT_STEP", "4")

    with pytest.raises(Diverged, match="diverged at step 4"):
        bench.train_here()

    assert [event.step for event in events_of(bench.workspace, TrainingDiverged)] == [4]
    saved = committed(bench.workspace.checkpoints)
    assert saved[-1].name == "step-00000003"
    tensors = saved[-1].tensors("model")
    assert all(bool(tensor.isfinite().all()) for tensor in tensors.values())
    assert not bench.workspace.model.exists()


@pytest.mark.parametrize("content", ["pruned", "stopped", ""])
def test_stop_file_ends_training_at_a_step_with_a_checkpoint(make_bench, monkeypatch, content):
    bench = make_bench(
        task="support.faults:Stops",
        training={"micro_batch_size": 4},
    )
    stop = bench.workspace.folder / "attempts" / "1" / "stop"
    monkeypatch.setenv("FAULT_STEP", "2")
    monkeypatch.setenv("STOP_FILE", str(stop))
    monkeypatch.setenv("STOP_CONTENT", content)

    bench.train_here()

    result = result_of(bench)
    assert result.outcome == (content or "stopped")
    assert (result.step, result.model) == (2, "")
    assert [path.name for path in committed(bench.workspace.checkpoints)] == ["step-00000002"]
    assert events_of(bench.workspace, TrainingFinished) == []


def test_overflow_under_a_loss_scaler_skips_the_step(make_bench, monkeypatch):
    """Use PyTorch's own scaler on the CPU. float16 itself needs a GPU."""
    from steadytrain.components.train.loop import setup

    make = setup.make_accelerator

    def with_scaler(config, **options):
        accelerator = make(config, **options)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        return accelerator

    monkeypatch.setattr(setup, "make_accelerator", with_scaler)
    monkeypatch.setenv("FAULT_STEP", "3")
    bench = make_bench(
        task="support.faults:InfiniteGradient",
        training={"micro_batch_size": 4, "save_steps": 1, "lr_scheduler_type": "linear"},
    )

    bench.train_here()

    overflow = events_of(bench.workspace, GradientOverflow)
    assert [(event.step, event.scale) for event in overflow] == [(3, 2.0**7)]
    steps = events_of(bench.workspace, TrainingStep)
    assert steps[3].learning_rate == steps[2].learning_rate
    assert result_of(bench).outcome == "finished"


@pytest.mark.parametrize("limit", [0.0, 1e-3, 0.8, 1e3])
def test_clipped_steps_are_counted_and_reported_once(make_bench, monkeypatch, limit):
    monkeypatch.setattr(reporter, "CLIPPED_STEPS", 2)
    bench = make_bench(training={"max_grad_norm": limit})

    bench.train_here()

    steps = events_of(bench.workspace, TrainingStep)
    clipped = [bool(limit) and event.grad_norm > limit for event in steps]
    assert [event.clipped_steps for event in steps] == list(accumulate(clipped))
    shares = [sum(pair) / 2 for pair in zip(clipped[::2], clipped[1::2], strict=True)]
    expected = [
        (2 * place + 2, share)
        for place, share in enumerate(shares)
        if share > 0.5 and (place == 0 or shares[place - 1] <= 0.5)
    ]
    found = events_of(bench.workspace, GradientOverflow)
    assert [(event.step, event.clipped) for event in found] == expected
    assert bool(found) == (limit in (1e-3, 0.8))
    assert all((event.steps, event.scale) == (2, None) for event in found)


def test_export_that_cannot_be_written_leaves_nothing_half(make_bench, monkeypatch):
    from steadytrain.components.tasks.causal_lm import LanguageModelPackager

    def full_disk(self, model, folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LanguageModelPackager, "export", full_disk)
    bench = make_bench()

    with pytest.raises(StorageError, match="No space left"):
        bench.train_here()

    assert not [path for path in bench.workspace.folder.iterdir() if "model" in path.name]


def test_second_export_replaces_the_first(make_bench):
    bench = make_bench()
    bench.train_here()
    first = weights_digest(bench.workspace)

    bench.train_here(2, resume_from=bench.workspace.checkpoints / "step-00000003")

    assert weights_digest(bench.workspace) == first
    assert not list(bench.workspace.folder.glob(".*model*"))


def test_export_of_a_superseded_run_is_discarded(make_bench, monkeypatch):
    from steadytrain.components.tasks.causal_lm import LanguageModelPackager

    bench, export = make_bench(), LanguageModelPackager.export
    bench.train_here()
    (bench.workspace.model / "put in place by another").touch()
    with contextlib.ExitStack() as supervisors:

        def takes_long(self, model, folder):
            export(self, model, folder)
            leases = LocalStorage(bench.workspace.lease)
            supervisors.enter_context(hold(leases, run_id="run", seconds=60))

        monkeypatch.setattr(LanguageModelPackager, "export", takes_long)
        with pytest.raises(RunBusy, match="taken over"):
            bench.train_here(2, resume_from=bench.workspace.checkpoints / "step-00000003")
    assert (bench.workspace.model / "put in place by another").exists()


def test_missing_rank_specification_is_reported(tmp_path):
    with pytest.raises(BadInput, match=r"spec\.json"):
        Rank(AttemptFolder(tmp_path)).run()


def changed_spec(folder, **changes):
    path = AttemptFolder(folder).spec
    AttemptSpec.load(path).model_copy(update=changes).save(path)
    return folder


def test_lower_learning_rate_holds_after_the_state_is_loaded(make_bench):
    bench = make_bench()
    bench.train_here()
    before = {event.step: event.learning_rate for event in events_of(bench.workspace, TrainingStep)}
    checkpoint = CheckpointStore(bench.workspace.checkpoints, keep=9).path(3)
    folder = bench.attempt(2, resume_from=checkpoint)
    rank = Rank(AttemptFolder(changed_spec(folder, learning_rate_scale=0.1)))
    rank.run()
    after = {
        event.step: event.learning_rate
        for event in events_of(bench.workspace, TrainingStep)
        if event.attempt == 2
    }
    assert after == pytest.approx({step: 0.1 * before[step] for step in (4, 5, 6)})


def test_unset_learning_rate_keeps_its_earlier_decision(make_bench):
    """The rules of a later version do not change it."""
    bench = make_bench(training={"learning_rate": None, "warmup_steps": 1})
    earlier = Decision("training.learning_rate", 0.25, "by an earlier version's rules")
    folder = changed_spec(bench.attempt(), recipe=(earlier,))
    Rank(AttemptFolder(folder)).run()
    (started,) = events_of(bench.workspace, TrainingStarted)
    assert started.recipe == [asdict(earlier)]
    assert max(event.learning_rate for event in events_of(bench.workspace, TrainingStep)) == 0.25


@pytest.mark.slow
def test_plan_can_ask_for_activation_checkpointing(make_bench):
    bench = make_bench()
    folder = changed_spec(bench.attempt(), batch=BatchSettings(2, gradient_checkpointing=True))
    rank = Rank(AttemptFolder(folder))
    rank.run()
    assert rank.training.parts.module.is_activation_checkpointing


def test_model_without_checkpointing_support_fails_with_memory_as_the_cause(make_bench):
    bench = make_bench(
        model={"config": {"model_type": "ctrl", "n_embd": 32, "n_layer": 1, "n_head": 2}}
    )
    folder = changed_spec(bench.attempt(), batch=BatchSettings(2, gradient_checkpointing=True))
    with pytest.raises(CannotRecompute, match="CTRL"):
        Rank(AttemptFolder(folder)).run()


def test_model_without_recomputation_is_rejected(make_bench):
    bench = make_bench(
        model={"config": {"model_type": "ctrl", "n_embd": 32, "n_layer": 1, "n_head": 2}},
        training={"gradient_checkpointing": True},
    )

    with pytest.raises(BadInput, match="gradient_checkpointing"):
        bench.train_here()

"""What a run changes when it runs out of memory or diverges, and in which order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.sizing.batch import BatchPlan, plan_batch
from steadytrain.components.sizing.hardware import GIB
from steadytrain.components.train.failures import FailureClass
from steadytrain.components.train.fallbacks import (
    Lengths,
    all_fallbacks,
    expected_fallbacks,
    fallbacks_for,
    next_fallback,
)

from support.decided import Run, replace_settings


def test_fallbacks_are_tried_in_order_and_listed_at_the_end():
    run = Run()
    walked = []
    needed = 30 * GIB
    while (decision := run.fail(FailureClass.GPU_OOM, memory_needed=needed)).action != "stop":
        assert (decision.action, decision.delay_seconds) == ("retry_changed", 0)
        walked.append(str(run.plan))
        assert run.plan.global_batch_size == 8
    assert walked == ["4 x 2", "2 x 4", "1 x 8", "1 x 8, activation checkpointing"]
    for fallback in fallbacks_for(FailureClass.GPU_OOM, "GPU", ["ddp"]):
        assert fallback.name in decision.reason
    assert "FSDP: nothing left to reduce" in decision.reason
    assert "4 x 2 ended with gpu_oom at step 0" in decision.reason
    assert "about 32.2 GB" in decision.reason
    assert "smallest GPU with enough memory: A100-40 (40 GB)" in decision.reason


@pytest.mark.parametrize(
    ("begins", "device", "walked"),
    [
        ("ddp", "GPU", ["fsdp", "fsdp, offload all"]),
        ("ddp", "cpu", ["fsdp"]),
        ("zero1", "GPU", ["zero2", "zero3", "zero3, offload all"]),
        ("zero2", "cpu", ["zero3"]),
        ("fsdp", "cpu", []),
    ],
)
def test_several_ranks_shard_more_and_more_state(begins, device, walked):
    run = Run(batch=2, ranks=2, device=device)
    run.plan = run.plan.changed(strategy=begins, gradient_checkpointing=True)
    found = []
    while (decision := run.fail(FailureClass.GPU_OOM)).action != "stop":
        found.append(str(run.plan).removeprefix("1 x 1, activation checkpointing, "))
    assert found == walked
    assert ("this memory is host memory" in decision.reason) == (device == "cpu")


@pytest.mark.parametrize(
    ("prefer", "expected"),
    [
        ("native", ["FSDP", "CPU offload"]),
        (None, ["FSDP", "CPU offload"]),
        ("deepspeed", ["DeepSpeed ZeRO-2", "DeepSpeed ZeRO-3", "CPU offload"]),
    ],
)
def test_sharding_follows_the_preference_in_the_plan_and_in_the_run(prefer, expected):
    run = Run(batch=2, ranks=2, device="GPU", prefer=prefer)
    run.plan = run.plan.changed(strategy="ddp", gradient_checkpointing=True)
    announced = expected_fallbacks(run.plan, "GPU", conflict_with=lambda _: "", prefer=prefer)
    taken = []
    while (decision := run.fail(FailureClass.GPU_OOM)).action != "stop":
        taken.append(decision.fallback)
    assert taken == announced == expected


@pytest.mark.parametrize(("least", "walked"), [(None, []), (300, [500, 300]), (1000, [])])
def test_sequences_are_shortened_last_and_only_on_request(least, walked):
    run = Run(replace_settings(min_sequence_length=least), batch=1, device="cpu", length=1000)
    run.plan = run.plan.changed(gradient_checkpointing=True)
    lengths = Lengths.of(1000, least)
    announced = expected_fallbacks(
        run.plan, "cpu", conflict_with=lambda _: "", prefer=None, lengths=lengths
    )
    assert announced == ["shorter sequences"] * bool(walked)
    found = []
    while (decision := run.fail(FailureClass.GPU_OOM)).action != "stop":
        assert (decision.fallback, decision.batch.micro_batch_size) == ("shorter sequences", 1)
        assert "so the model learns something else" in decision.reason
        found.append(run.plan.settings.sequence_length)
    assert found == walked
    assert ("shorter sequences: 1 x 1, activation" in decision.reason) == bool(walked)
    shortened = run.history.shortened
    assert (shortened.batch.sequence_length if shortened else None) == (walked or [None])[-1]


def test_fallback_that_would_not_help_is_skipped():
    """In the plan's estimate, weights and moments need most memory at any micro-batch."""
    needed = {4: 990, 2: 985, 1: 980}

    def estimate(plan):
        return needed[plan.micro_batch_size] - (500 if plan.settings.strategy == "fsdp" else 0)

    plan = plan_batch(8, 2, 4)
    found = fallbacks_for(FailureClass.GPU_OOM, "GPU", ["ddp"])
    fallback, lowered = next_fallback(plan, found, estimate)
    assert (fallback.name, str(lowered)) == ("FSDP", "4 x 1, fsdp")
    fallback, _ = next_fallback(plan, found)
    assert fallback.name == "smaller micro-batch"


def test_option_without_sharding_support_skips_the_sharding_fallback():
    conflicts = {"fsdp": "training.fp16", "cpu": ""}
    found = fallbacks_for(FailureClass.GPU_OOM, "GPU", ["ddp"], conflict_with=conflicts.get)
    plan = plan_batch(2, 2).changed(gradient_checkpointing=True)
    assert next_fallback(plan, found) is None
    assert {fallback.name: fallback.missing for fallback in found}[
        "FSDP"
    ] == "not with training.fp16"


def test_divergence_skips_then_slows_then_stops():
    run = Run()
    first, second, third = (run.fail(FailureClass.DIVERGENCE) for _ in range(3))
    assert (first.skipped_batch, first.learning_rate_scale) == (0, 1)
    assert (second.skipped_batch, second.learning_rate_scale) == (None, 0.1)
    assert third.action == "stop"
    assert run.history.skipped_batches == (0,)
    assert run.history.learning_rate_scale == 0.1


def test_after_a_new_checkpoint_a_divergence_is_the_first_again():
    run = Run()
    run.fail(FailureClass.DIVERGENCE)
    again = run.fail(FailureClass.DIVERGENCE, saves=True)
    assert again.skipped_batch == 1, "the batch that is taken where the first is left out"


def test_fallbacks_use_no_retry_budget():
    run = Run()
    for kind in (FailureClass.NETWORK, FailureClass.GPU_OOM) * 2:
        assert run.fail(kind).action != "stop"
    assert run.fail(FailureClass.NETWORK).delay_seconds == 120


def test_micro_batch_halved_in_place_is_not_tried_again():
    run = Run()
    run.fail(FailureClass.GPU_OOM, halves=[4, 2, 1])
    assert str(run.plan) == "1 x 8, activation checkpointing"
    stopped = run.fail(FailureClass.GPU_OOM)
    assert "smaller micro-batch: 1 x 8 ended with gpu_oom at step 0;" in stopped.reason


def test_halving_in_place_pays_for_no_later_failure():
    run = Run()
    decisions = [run.fail(FailureClass.NETWORK, halves=[size]) for size in (4, 2, 1)]
    assert [item.delay_seconds for item in decisions] == [2, 4, 120]


NO_SNAPSHOT = "8 x 1, no snapshot in host memory"


SMALLER = ["4 x 2, ", "2 x 4, ", "1 x 8, ", "1 x 8, activation checkpointing, "]


@pytest.mark.parametrize(
    ("device", "walked"),
    [
        ("cpu", [NO_SNAPSHOT, *(f"{plan}no snapshot in host memory" for plan in SMALLER)]),
        ("NVIDIA H100", [NO_SNAPSHOT]),
    ],
)
def test_host_oom_halves_the_micro_batch_only_on_a_cpu(device, walked):
    run, found = Run(device=device), []
    while (decision := run.fail(FailureClass.HOST_OOM)).fallback:
        assert (decision.action, decision.delay_seconds) == ("retry_changed", 0)
        assert run.plan.global_batch_size == 8
        found.append(str(run.plan))
    assert found == walked
    if device == "cpu":
        assert decision.action == "stop"
        assert "no snapshot in host memory: 8 x 1, no snapshot in host memory ended with" in (
            decision.reason
        )
    else:
        assert (decision.action, decision.delay_seconds) == ("retry", 2)
        assert run.fail(FailureClass.HOST_OOM).delay_seconds == 4


@pytest.mark.parametrize("device", ["cpu", "NVIDIA H100"])
def test_rank_killed_for_an_unknown_reason_changes_nothing(device):
    assert Run(device=device).fail(FailureClass.HOST_OOM, unexplained=True).action == "retry"


def test_lowered_settings_stay_lowered():
    """The fallbacks for one memory stay in effect when the other memory runs out."""
    run = Run(device="NVIDIA H100")
    kinds = [FailureClass.GPU_OOM, FailureClass.HOST_OOM, FailureClass.GPU_OOM]
    plans = []
    for kind in kinds:
        run.fail(kind)
        plans.append(str(run.plan))
    copied, in_place = "4 x 2", "no snapshot in host memory"
    assert plans == [copied, f"{copied}, {in_place}", f"2 x 4, {in_place}"]


@given(share=st.integers(1, 500), world=st.integers(1, 64))
def test_fallbacks_end_and_keep_the_global_batch(share, world):
    plan, fallbacks = BatchPlan(BatchSettings(share), 1, world), 0
    known = [item for item in all_fallbacks(["ddp", "fsdp"]) if item.memory == "device"]
    while found := next_fallback(plan, known):
        _, lowered = found
        assert lowered.global_batch_size == share * world
        assert lowered.micro_batch_size <= max(1, plan.micro_batch_size // 2)
        plan, fallbacks = lowered, fallbacks + 1
    shared = world > 1
    assert fallbacks <= share.bit_length() + 2 * shared
    own = plan.settings
    assert (own.micro_batch_size, own.gradient_checkpointing) == (1, True)
    assert (own.strategy, own.offload) == (("fsdp", "all") if shared else ("ddp", "none"))

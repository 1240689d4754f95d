"""A plan uses what earlier runs have learned."""

from __future__ import annotations

import pytest

from steadytrain.components.plan.plan import plan_training
from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.events.types import DecisionMade
from steadytrain.components.shared.records import DataRecord, SideRecord
from steadytrain.components.sizing.hardware import all_gpus, find_gpu
from steadytrain.components.train.recovery.history import History
from steadytrain.components.train.recovery.sizing import Sizing

DEVICE = "NVIDIA H100 80GB HBM3"
FIELDS = {"model__base": "hub:Qwen/Qwen2.5-0.5B", "training__bf16": True}


def decisions_of(plan):
    return {item.field: item for item in plan.decisions}


@pytest.fixture
def learn(configure):
    """Record that a run ran out of memory and trained with a smaller micro-batch."""

    def make(micro_batch_size, ranks=1, **fields):
        sizing = sizing_of(configure(**FIELDS, compute__nproc_per_node=ranks, **fields))
        sizing.remember(History(decisions=[smaller(micro_batch_size)]))
        return sizing

    return make


def sizing_of(config):
    side = SideRecord(shards=[], rows=1000, documents=1000)
    data = DataRecord(
        folder="data",
        fingerprint="f",
        task=config.data.task,
        sides={"train": side, "validation": side, "test": side},
        test_records="",
        split_digest="s",
        sequence_length=config.data.sequence_length,
    )
    return Sizing(config, data, DEVICE, config.compute.world_size)


def smaller(micro_batch_size, **changes):
    return DecisionMade(
        attempt=1,
        failure_class="gpu_oom",
        action="retry_changed",
        reason="so",
        batch=BatchSettings(micro_batch_size, **{"strategy": "", **changes}),
    )


def test_learned_settings_are_planned_for_the_next_run(make_plan, learn):
    before = make_plan("h100", **FIELDS)
    sizing = learn(2)
    plan = make_plan("h100", **FIELDS)
    history = History(decisions=[sizing.learned()])
    assert plan.choice.plan == sizing.plan(history)
    assert str(plan.choice.plan) == "2 x 16"
    assert before.choice.batch.micro_batch_size > 2
    assert plan.choice.memory.total < before.choice.memory.total
    decision = decisions_of(plan)["training.micro_batch_size"]
    assert (decision.value, decision.reason[:8]) == (2, "learned:")
    assert str(sizing._path) in decision.reason
    changed = {f for f, item in decisions_of(plan).items() if item != decisions_of(before)[f]}
    assert changed <= {"training.micro_batch_size", "training.save_steps"}


def test_learned_fallbacks_are_planned_too(make_plan, configure):
    config = configure(**FIELDS, compute__nproc_per_node=2)
    lowered = smaller(1, gradient_checkpointing=True, strategy="fsdp", offload="all")
    sizing_of(config).remember(History(decisions=[lowered]))
    plan = make_plan("h100", 2, **FIELDS)
    found = decisions_of(plan)
    for field, value in {
        "compute.strategy": "fsdp",
        "compute.offload": "all",
        "training.gradient_checkpointing": True,
    }.items():
        assert found[field].value == value
        assert found[field].reason.startswith("learned:")
    assert plan.choice.memory.host > 0


def test_user_batch_stays_as_an_upper_bound(make_plan, learn):
    learn(2, training__micro_batch_size=8)
    plan = make_plan("h100", **FIELDS, training__micro_batch_size=8)
    decision = decisions_of(plan)["training.micro_batch_size"]
    assert (decision.value, decision.yours) == (8, True)
    assert decision.reason.startswith("set by you, but learned:")
    assert plan.choice.batch.micro_batch_size == 2


def test_learned_settings_apply_to_no_other_run(make_plan, learn, configure):
    plain = make_plan("h100", **FIELDS).choice
    learn(2, data__sequence_length=512)
    learn(2, model__adapter__kind="lora")
    learn(2, ranks=2)
    assert make_plan("h100", **FIELDS).choice == plain
    learn(2)
    plan = plan_training(configure(**FIELDS), all_gpus(), find_gpu("a100"))
    assert not plan.choice.learned
    offers = {offer.gpu: offer.how for offer in plan.offers}
    assert offers["H100"].endswith("2 x 16"), "of the GPUs that it was not asked for too"


def test_learned_limit_of_the_configuration_as_written_is_reported(make_plan, configure):
    """That run trains in 32 bits, but the plan is for 16 bits."""
    base = {"model__base": FIELDS["model__base"]}
    sizing_of(configure(**base)).remember(History(decisions=[smaller(2)]))
    plan = make_plan("h100", **base)
    assert not plan.choice.learned
    assert "starts with a micro-batch of at most 2" in plan.remarks[0]
    assert not make_plan("h100", **FIELDS).remarks


def test_settings_that_fit_are_unchanged(make_plan, learn):
    learn(2)
    plan = make_plan("h100", **FIELDS, training__global_batch_size=2)
    assert not plan.choice.learned

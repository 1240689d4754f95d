"""What a plan decides, what it does not change, and what it says if nothing works."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from steadytrain.components.plan.offer import policy
from steadytrain.components.plan.plan import plan_training
from steadytrain.components.plan.render import filled, render
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.records import DataRecord, SideRecord
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.sizing.fit import choose
from steadytrain.components.sizing.hardware import all_gpus, find_gpu, priced
from steadytrain.components.sizing.machine import Hosts, Node
from steadytrain.components.sizing.strategy import offloading_options, options
from steadytrain.components.train.recovery.history import History
from steadytrain.components.train.recovery.sizing import Sizing

LLAMA = "hub:meta-llama/Llama-3"
SMALL = "hub:Qwen/Qwen2.5-0.5B"
H100 = find_gpu("h100")


def chosen(plan):
    return {decision.field: decision.value for decision in plan.decisions}


def reasons(plan):
    return {decision.field: decision.reason for decision in plan.decisions}


@pytest.mark.parametrize(
    ("base", "gpus", "strategy"),
    [
        (SMALL, 1, "single"),
        (SMALL, 8, "ddp"),
        (f"{LLAMA}.2-3B", 8, "fsdp"),
        (f"{LLAMA}.1-8B", 8, "fsdp"),
        (f"{LLAMA}.1-70B", 8, "zero3"),
    ],
)
def test_strategy_by_size(make_plan, base, gpus, strategy):
    plan = make_plan("h100", gpus, model__base=base)
    assert plan.works
    assert chosen(plan)["compute.strategy"] == strategy
    if gpus > 1:
        assert "rule: strategy by size" in reasons(plan)["compute.strategy"]


def test_models_of_10b_to_100b_are_recomputed_and_offloaded(make_plan):
    plan = make_plan("h100", 8, model__base=f"{LLAMA}.1-70B")
    assert chosen(plan)["training.gradient_checkpointing"] is True
    assert chosen(plan)["compute.offload"] != "none"


def test_models_above_100b_are_rejected_with_what_they_need(make_plan):
    with pytest.raises(BadInput, match=r"405\.9 billion parameters") as error:
        make_plan("h100", 8, model__base=f"{LLAMA}.1-405B")
    for word in ("tensor and pipeline parallelism", "6.5 TB", "Llama-3.1-70B"):
        assert word in error.value.remedy


def test_global_batch_is_split_among_ranks(make_plan):
    for gpus in (1, 2, 4, 8):
        plan = make_plan("a100", gpus, training__global_batch_size=48)
        assert plan.choice.batch.global_batch_size == 48
        assert plan.choice.batch.world_size == gpus


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("compute.strategy", "zero2"),
        ("training.gradient_checkpointing", True),
        ("training.micro_batch_size", 2),
        ("training.optim", "adamw_bnb_8bit"),
        ("model.adapter.kind", "lora"),
        ("training.learning_rate", 3e-3),
        ("training.warmup_steps", 0.3),
        ("training.save_steps", 7),
    ],
)
def test_user_settings_stay(make_plan, field, value):
    plan = make_plan("h100", 8, **{field.replace(".", "__"): value})
    decision = next(item for item in plan.decisions if item.field == field)
    assert (decision.value, decision.yours) == (value, True)
    used = plan.choice.option
    held = {
        "compute.strategy": used.strategy,
        "training.gradient_checkpointing": used.recompute,
        "training.micro_batch_size": plan.choice.batch.micro_batch_size,
        "training.optim": used.optim,
        "model.adapter.kind": used.adapter,
    }
    assert held.get(field, value) == value


@pytest.mark.parametrize(("given", "base"), [(1e-5, 1), (None, 1), (1e-5, 32), (4e-5, 512)])
def test_scaled_learning_rate_is_what_the_rule_judges(make_plan, given, base):
    batch = {"training__global_batch_size": 128, "training__base_global_batch_size": base}
    scaled = {"training__learning_rate": given, "training__lr_scaling": "linear"}
    plan = make_plan("h100", 8, **scaled, **batch)
    rate = (given or 1e-5) * 128 / base
    remark = "by training.lr_scaling is outside the rule's 5e-6 to 1e-5"
    assert (remark in "\n".join(plan.remarks)) == (rate > 1e-5)


def test_learning_rate_outside_the_rule_stays_with_a_remark(make_plan):
    plan = make_plan("h100", 8, training__learning_rate=3e-3, training__warmup_steps=0.3)
    told = "\n".join(plan.remarks)
    assert "3e-3 is outside the rule's 5e-6 to 1e-5" in told
    assert "warmup_steps = 0.3 is outside" in told


def test_plan_says_how_often_a_landscape_scores_the_sample(make_plan):
    landscape = {"points": 5, "records": 20}
    (remark,) = (
        text
        for text in make_plan("t4", model__base=SMALL, evaluation__landscape=landscape).remarks
        if "landscape" in text
    )
    # 25 points, each with three batches of up to eight records.
    assert "scores 20 test records 25 times: 75 forward passes" in remark
    plain = make_plan("t4", model__base=SMALL).remarks
    assert not any("landscape" in text for text in plain)


def test_cpu_run_sees_that_the_plan_is_for_a_gpu(make_plan):
    plan = make_plan("t4", model__base=SMALL, compute__device="cpu")
    assert "compute.device = cpu is unchanged" in plan.remarks[0]


@pytest.mark.parametrize(
    ("base", "kind", "rate"),
    [
        (SMALL, "none", 1e-4),
        (f"{LLAMA}.2-1B", "none", 5e-5),
        (f"{LLAMA}.1-8B", "none", 1e-5),
        (f"{LLAMA}.1-8B", "lora", 2e-4),
    ],
)
def test_learning_rate_follows_model_size(make_plan, base, kind, rate):
    plan = make_plan("h100", 8, model__base=base, model__adapter__kind=kind)
    assert chosen(plan)["training.learning_rate"] == rate


def test_adapters_get_the_rules_defaults(make_plan):
    found = chosen(make_plan("h100"))
    assert found["model.adapter.kind"] == "lora"
    assert found["model.adapter.alpha"] == 2 * found["model.adapter.rank"] == 32
    assert 0.05 <= found["model.adapter.dropout"] <= 0.1


def test_gpus_that_cannot_run_it_are_skipped_if_nothing_fits(make_plan):
    """A T4 trains in float16, which does not support sharding."""
    plan = make_plan("rtx4050", 2, compute__strategy="zero2")
    assert not plan.works
    assert plan.remedies
    with pytest.raises(BadInput, match="T4 has no bfloat16, and float16 does not support sharding"):
        make_plan("t4", 2, compute__strategy="zero2")


def test_model_from_scratch_is_never_adapted(make_plan):
    config = {"model_type": "llama"}
    plan = make_plan("l4", model={"config": config})
    assert chosen(plan)["model.adapter.kind"] == "none"
    assert not plan.works
    assert "compute.offload" in "\n".join(plan.remedies)


@pytest.mark.parametrize(("gpu", "field"), [("t4", "fp16"), ("v100", "fp16"), ("l4", "bf16")])
def test_half_precision_follows_the_gpu(make_plan, gpu, field):
    assert chosen(make_plan(gpu, model__base=SMALL))[f"training.{field}"] is True


def test_unsupported_bfloat16_is_a_problem_with_a_remedy(make_plan):
    plan = make_plan("t4", model__base=SMALL, training__bf16=True)
    assert not plan.works
    assert (
        "T4 has no bfloat16; the nearest setting that works is training.fp16=true"
        in plan.problems[0]
    )


def test_requested_full_precision_stays(make_plan):
    plan = make_plan("h100", model__base=SMALL, training__bf16=False)
    assert plan.choice.setting.precision == "fp32"
    faster = make_plan("h100", model__base=SMALL)
    assert faster.offer.tokens_per_second.low > plan.offer.tokens_per_second.low


def test_batch_that_is_too_large_is_reported_with_what_fits(make_plan):
    plan = make_plan("rtx4090", training__micro_batch_size=32)
    assert not plan.works
    assert chosen(plan)["training.micro_batch_size"] == 32
    assert "training.micro_batch_size=" in plan.remedies[0]


def test_strategy_that_does_not_fit_is_reported_with_one_that_does(make_plan):
    fields = {"compute__strategy": "ddp", "model__adapter__kind": "none"}
    plan = make_plan("h100", 4, **fields)
    assert not plan.works
    assert plan.remedies[0].startswith("compute.strategy=fsdp")


def test_sequences_beyond_the_models_limit_are_a_problem(make_plan):
    plan = make_plan("h100", model__base="hub:gpt2", data__sequence_length=2048)
    assert "the nearest setting that works is data.sequence_length=1024" in plan.problems[0]


def test_every_remedy_that_is_a_setting_works(make_plan):
    """Every setting that the plan says fits can be planned, and fits."""
    plan = make_plan("rtx4050")
    for remedy in plan.remedies:
        settings, found, _ = remedy.partition(" fits")
        assert found
        if settings.startswith("--gpu "):
            assert make_plan(settings.removeprefix("--gpu ")).works
            continue
        fields = dict(setting.split("=") for setting in settings.split(", "))
        assert make_plan("rtx4050", **fields).works, remedy


def test_cheapest_fitting_gpu_is_chosen_by_default(make_plan):
    plan = make_plan(model__base=SMALL)
    prices = [offer.usd_per_million_tokens for offer in plan.cheapest]
    known = [price for price in prices if price is not None]
    assert known == sorted(known)
    assert prices[: len(known)] == known
    assert plan.job.machine.gpu.name == plan.cheapest[0].gpu
    speeds = [offer.tokens_per_second.middle for offer in plan.fastest]
    assert speeds == sorted(speeds, reverse=True)
    assert {offer.gpu for offer in plan.offers} == {gpu.name for gpu in all_gpus()}


@pytest.mark.slow
def test_known_spot_prices_are_used(configure, tmp_path):
    path = tmp_path / "prices.yaml"
    path.write_text("h100: {usd_per_hour: 4, spot_usd_per_hour: 2}\nt4: {usd_per_hour: 1}\n")
    gpus = priced(path).gpus
    plan = plan_training(configure(), gpus, find_gpu("h100", gpus))
    assert plan.offer.usd is not None
    assert plan.offer.hours is not None
    assert plan.offer.usd.low == pytest.approx(4 * plan.offer.hours.low)
    assert plan.offer.spot_usd is not None
    lost = plan.preemptions.factor
    assert lost > 1
    assert plan.offer.spot_usd.low == pytest.approx(2 * lost * plan.offer.hours.low)
    unknown = plan_training(configure(), gpus, find_gpu("t4", gpus))
    assert unknown.offer.spot_usd is None


def test_user_price_covers_the_whole_cluster(make_plan):
    plan = make_plan("l4", 2, compute__price_per_hour=3.0, model__base=SMALL)
    assert plan.offer.usd is not None
    assert plan.offer.hours is not None
    assert plan.offer.usd.high == pytest.approx(3 * plan.offer.hours.high)


def prepared(config, side, folder):
    """Save a record of prepared data with three such sides."""
    DataRecord(
        folder=folder,
        fingerprint="f",
        task="supervised_finetuning",
        sides={"train": side, "validation": side, "test": side},
        test_records="",
        split_digest="s",
    ).save(Workspace.of(config).record("preprocess"))


def test_steps_come_from_the_prepared_data(configure):
    config = configure(training__max_steps=-1, training__num_train_epochs=2)
    side = SideRecord(shards=[], rows=1000, documents=3000, tokens=700_000)
    prepared(config, side, "data")
    plan = plan_training(config, [H100], H100)
    assert plan.length.steps == 63
    assert plan.length.tokens == pytest.approx(63 * 32 * 700)
    assert chosen(plan)["training.save_strategy"] is None, "a run goes by what it measures"


@pytest.mark.parametrize(
    ("task", "documents", "shown"),
    [
        ("supervised_finetuning", 3000, "3 to 5 epochs, 94 to 157 steps: below 10,000 examples"),
        ("supervised_finetuning", 50_000, "2 to 4 epochs, 63 to 125 steps: from 10,000"),
        ("supervised_finetuning", 5_000_000, "1 epoch, 32 steps: above 1 million"),
        ("causal_lm", 3000, "1 to 4 epochs, 32 to 125 steps: on plain text"),
    ],
)
def test_plan_recommends_epochs_by_the_amount_of_data(configure, task, documents, shown):
    config = configure(data__task=task)
    prepared(config, SideRecord(shards=[], rows=1000, documents=documents, tokens=700_000), "data")
    plan = plan_training(config, [H100], H100)
    assert f"recommended     {shown}" in render(plan)


@pytest.mark.parametrize(
    ("documents", "tokens", "field", "strategy"),
    [
        (3000, 150_000, "training.save_strategy", "epoch"),
        (3000, 7000, "training.save_strategy", None),
        (3000, 7_000_000_000, "training.save_strategy", None),
        (200_000, 150_000, "training.save_steps", None),
    ],
    ids=["small", "an epoch takes no time", "an epoch takes hours", "many examples"],
)
def test_plan_saves_small_data_by_epoch(configure, documents, tokens, field, strategy):
    config = configure()
    side = SideRecord(shards=[], rows=1000, documents=documents, tokens=tokens)
    prepared(config, side, "data")
    plan = plan_training(config, [H100], H100)
    found = {name: value for name, value in chosen(plan).items() if "save" in name}
    assert found == {field: strategy}
    told = reasons(plan)[field]
    assert ("an epoch takes about" in told) == (strategy == "epoch")
    data = DataRecord.load(Workspace.of(config).record("preprocess"))
    last = Sizing(config, data, "no such GPU", 1).decisions(History())[-1]
    assert last.field == field
    assert told.startswith(last.reason), "the run tells the same rule"
    given = configure(training__save_strategy="time")
    assert chosen(plan_training(given, [H100], H100))["training.save_strategy"] == "time"


@pytest.mark.parametrize("records", [300, 0])
def test_plan_before_preparation_saves_the_records_it_counts_by_epoch(configure, tmp_path, records):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(f'{{"text": "record {n}, and some words"}}\n' for n in range(records)))
    given = {"data__task": "causal_lm", "data__source": [str(path)]}
    config = configure(**given, model__tokenizer="hub:nobody/nothing")
    plan = plan_training(config, [H100], H100)
    assert ("training.save_strategy" in chosen(plan)) == bool(records)
    assert ("training.save_steps" in chosen(plan)) == (not records)
    if records:
        counted = f"about {plan.job.sampled.documents} training examples before preparation"
        assert reasons(plan)["training.save_strategy"].startswith(counted)
        assert 200 < plan.job.sampled.documents < records
        assert filled(plan).training.save_strategy is None


def test_size_of_all_data_and_not_a_prepared_sample_decides_about_checkpoints(configure, tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(f'{{"text": "record {n}, and some words"}}\n' for n in range(300)))
    given = {"data__task": "causal_lm", "data__source": [str(path)]}
    config = configure(**given, model__tokenizer="hub:nobody/nothing")
    prepared(config, SideRecord(shards=[], rows=10, documents=300, tokens=2000), "data")
    assert "training.save_strategy" in chosen(plan_training(config, [H100], H100))
    whole = plan_training(config, [H100], H100, data_bytes=1000 * path.stat().st_size)
    assert chosen(whole)["training.save_steps"] is None


@pytest.mark.parametrize(
    ("fields", "value", "reason"),
    [
        ({}, None, "auto becomes sdpa: Transformers has PyTorch's fused kernels for llama"),
        ({"training__attention": "eager"}, "eager", "set by you"),
        (
            {
                "model__base": None,
                "model__config": {"model_type": "gpt2", "attn_implementation": "eager"},
            },
            None,
            "auto becomes eager: model.config.attn_implementation says so",
        ),
    ],
)
def test_plan_says_what_becomes_of_attention(configure, fields, value, reason):
    plan = plan_training(configure(**fields), [H100], H100)
    field = "training.attention"
    assert (chosen(plan)[field], reasons(plan)[field]) == (value, reason)
    assert filled(plan).training.attention == (value or "auto")


def test_plan_says_what_became_of_the_records(configure, tmp_path):
    config = configure()
    side = SideRecord(shards=[], rows=100, documents=300, tokens=70_000)
    prepared(config, side, str(tmp_path))
    card = {
        "records": 960,
        "defective": 2,
        "duplicates": {"near_duplicate": 51},
        "near_duplicate_threshold": 0.9,
        "sides": {
            "train": {"truncated": 3, "windowed": 5, "target_share": 0.25},
            "test": {"truncated": 4},
        },
        "quarantine": {"cut_to_nothing": 6, "dropped_as_long": 8},
    }
    (tmp_path / "card.json").write_text(json.dumps(card))
    remarks = plan_training(config, [H100], H100).remarks
    (told,) = [remark for remark in remarks if "near_duplicate" in remark]
    assert "960 records read, 2 defective, 0 exact_duplicate, 51 near_duplicate" in told
    long = "7 cut, 5 in windows, 8 dropped_as_long, 6 cut_to_nothing; used"
    assert f"(data.near_duplicate_threshold = 0.9), {long}" in told


def test_time_is_unknown_without_data_and_steps(make_plan):
    plan = make_plan("h100", training__max_steps=-1)
    assert plan.length.steps is None
    assert plan.offer.hours is None
    assert plan.offer.usd is None
    assert "steadytrain step preprocess" in plan.length.source


def test_more_gpus_scale_sublinearly(make_plan):
    base = {"model__base": SMALL, "training__global_batch_size": 64}
    one, eight = make_plan("h100", 1, **base), make_plan("h100", 8, **base)
    assert one.offer.hours is not None
    assert eight.offer.hours is not None
    assert one.offer.hours.high / 8 < eight.offer.hours.high < one.offer.hours.high


@pytest.mark.slow
def test_options_that_exceed_memory_are_never_chosen(make_plan):
    for gpu in all_gpus():
        plan = make_plan(gpu.name)
        assert plan.works == (plan.choice.memory.total <= 0.95 * gpu.memory)
        assert choose(plan.job, options(plan.job)) == plan.choice


PREFERRED = [
    (SMALL, "native", {"ddp", "fsdp"}),
    (SMALL, "deepspeed", {"ddp", "zero2", "zero3"}),
    (f"{LLAMA}.1-8B", "native", {"ddp", "fsdp"}),
    (f"{LLAMA}.1-8B", "deepspeed", {"ddp", "zero2", "zero3"}),
    (f"{LLAMA}.1-70B", "native", {"ddp", "fsdp"}),
    (f"{LLAMA}.1-70B", "deepspeed", {"ddp", "zero3"}),
]


@pytest.mark.parametrize(("base", "prefer", "strategies"), PREFERRED)
def test_only_the_preferred_library_shards(make_plan, base, prefer, strategies):
    plan = make_plan("a100", 8, model__base=base, compute__prefer=prefer)
    offloading = {option.strategy for option in offloading_options(plan.job)}
    assert offloading <= strategies | ({"zero2"} if prefer == "deepspeed" else set())
    assert {option.strategy for option in options(plan.job)} == strategies
    sharded = plan.choice.option.strategy != "ddp"
    assert (f"compute.prefer = {prefer}" in render(plan)) == sharded
    written = filled(plan).compute
    assert (written.prefer, written.strategy) == (None, plan.choice.option.strategy)


def test_deepspeed_takes_zero2_before_zero3(make_plan):
    base = {"model__base": f"{LLAMA}.1-8B", "compute__prefer": "deepspeed"}
    assert make_plan("h200", 8, **base).choice.option.strategy == "zero2"
    kept = [option.strategy for option in options(make_plan("h200", 8, **base).job)]
    assert kept.index("zero2") < kept.index("zero3")


def test_preference_with_a_strategy_is_refused(configure):
    with pytest.raises(BadInput, match=r"compute\.prefer"):
        configure(compute__prefer="native", compute__strategy="zero3", compute__nproc_per_node=2)


@pytest.mark.parametrize(("examples", "told"), [(999_999, True), (1_000_000, False)])
def test_one_gpu_is_enough_for_adapters_on_little_data(configure, examples, told):
    for gpus in (2, 1):
        config = configure(
            model__base=f"{LLAMA}.2-3B", model__adapter__kind="lora", compute__nproc_per_node=gpus
        )
        side = SideRecord(shards=[], rows=1000, documents=examples, tokens=10**7)
        prepared(config, side, "data")
        found = plan_training(config, [H100], H100).remarks
        assert any("one GPU is enough" in remark for remark in found) == (told and gpus == 2)


def test_methods_side_by_side_are_what_a_plan_for_each_would_choose(make_plan):
    base = {"model__base": f"{LLAMA}.2-3B"}
    plan = make_plan("a100", **base)
    names = {"all weights": "none", "lora": "lora", "qlora": "qlora"}
    assert [method.name for method in plan.compared] == list(names)
    for method in plan.compared:
        own = make_plan("a100", **base, model__adapter__kind=names[method.name])
        assert (method.offer is not None) == own.works
        if method.offer is not None:
            assert (method.offer.memory_gb, method.offer.usd) == (
                own.offer.memory_gb,
                own.offer.usd,
            )
    assert "they learn differently" in render(plan)
    small = make_plan("rtx4050", model__base=f"{LLAMA}.1-8B")
    assert small.compared[0].offer is None


@pytest.mark.slow
def test_goal_chooses_gpu_and_method(make_plan):
    free = make_plan()
    fastest = make_plan(training__goal="fastest")
    assert fastest.offer.gpu == fastest.fastest[0].gpu
    assert fastest.choice.option.adapter == "lora"
    assert "training.goal = fastest" in reasons(fastest)["model.adapter.kind"]
    unpriced = make_plan(training__goal="best")
    assert unpriced.choice.option.adapter == "none"
    assert unpriced.offer.usd is None
    best = make_plan(per_node=8, training__goal="best")
    assert best.choice.option.adapter == "none"
    whole = [offer for offer in best.cheapest if offer.method == "all weights"]
    assert best.offer.gpu == whole[0].gpu
    balanced = make_plan(training__goal="balanced")
    product = {
        offer.gpu: offer.usd.middle * offer.hours.middle for offer in free.cheapest if offer.usd
    }
    assert balanced.offer.gpu == min(product, key=product.get)
    assert "training.goal = balanced" in render(balanced)


@pytest.mark.parametrize(("gpu", "works"), [("v100", False), ("a10", True)])
def test_flash_attention_needs_a_gpu_with_its_kernels(make_plan, gpu, works):
    plan = make_plan(gpu, model__base=SMALL, training__attention="flash_attention_2")
    assert plan.works is works
    assert works or "training.attention=sdpa" in plan.problems[0]


@pytest.mark.parametrize(
    ("names", "model", "chosen", "how"),
    [
        (("t4", "h100"), SMALL, "T4", "cheapest"),
        (("rtx4060", "b200"), SMALL, "B200", "fastest"),
        (("rtx4060", "t4"), f"{LLAMA}.1-70B", "T4", "largest"),
    ],
)
def test_gpu_without_a_price_is_not_called_the_cheapest(make_plan, names, model, chosen, how):
    plan = make_plan(table=[find_gpu(name) for name in names], model__base=model)
    assert plan.job.machine.gpu.name == chosen
    assert how in plan.chosen_by
    assert ("cheapest" in plan.chosen_by) == (how == "cheapest")


def test_policy_names_the_fewest_nodes_a_run_can_continue_with(make_plan):
    two = make_plan("h100", 8, 2, model__base=f"{LLAMA}.1-70B")
    full = [size for size in two.scaling if size.gpus_per_node == 8]
    assert [size.nodes for size in full if size.offer] == [1, 2, 4]
    assert "it can continue with 1 (recovery.min_nodes=1)" in render(two)
    speeds = [size.offer.tokens_per_second.middle for size in full if size.offer]
    assert speeds == sorted(speeds)
    none = make_plan("t4", 8, 2, model__base=f"{LLAMA}.1-70B")
    assert "none of these sizes works" in render(none)


def test_policy_of_a_machine_without_sizes_does_not_say_that_none_works(make_plan):
    assert "none" not in policy(make_plan("t4", model__base=SMALL).job, [])


@pytest.mark.slow
def test_scaling_has_a_reason_for_each_number_of_gpus_up_to_128(make_plan):
    plan = make_plan("a100", 8)
    ranks = [size.nodes * size.gpus_per_node for size in plan.scaling]
    assert ranks == [1, 2, 4, 8, 16, 32, 64, 128]
    assert max(size.gpus_per_node for size in plan.scaling) == 8
    found = {size.nodes * size.gpus_per_node: size for size in plan.scaling}
    assert "not comparable" in found[2].reason
    four, eight = found[4].offer, found[8].offer
    speed = eight.tokens_per_second.middle / four.tokens_per_second.middle
    cost = eight.usd_per_million_tokens / four.usd_per_million_tokens
    gain = f"{speed:.2f} times as fast as 1 x 4 at {cost:.2f} times the cost per token"
    assert gain in found[8].reason
    assert "ranks wait for the network" in found[16].reason
    assert "training.global_batch_size=64 can" in found[64].reason
    large = make_plan("a100", 8, training__global_batch_size=256)
    assert {size.nodes * size.gpus_per_node: bool(size.offer) for size in large.scaling}[128]
    short = make_plan("t4", 1, model__base=f"{LLAMA}.1-70B")
    assert "it needs" in short.scaling[0].reason
    assert "usable" in short.scaling[0].reason


def test_policy_says_that_the_batch_of_small_cards_grows_with_the_ranks(make_plan):
    base = "hub:meta-llama/Llama-3.2-3B"
    assert "grows with the ranks" in render(make_plan("rtx4050", model__base=base))
    kept = make_plan("rtx4050", model__base=base, training__global_batch_size=16)
    assert "the global batch stays 16" in render(kept)


def test_sizes_that_a_cluster_lacks_say_so(make_plan):
    hosts = Hosts(nodes=[Node("H100", 8, 10**12)] * 2)
    plan = make_plan("h100", 8, 2, hosts=hosts)
    lacking = [size for size in plan.scaling if size.nodes > 2]
    assert lacking
    assert all(size.reason == "the cluster does not have that many H100" for size in lacking)


def test_own_price_is_that_of_the_configured_gpus_at_each_size(make_plan):
    plan = make_plan("a100", 8, compute__price_per_hour=16.0)
    for size in (size for size in plan.scaling if size.offer):
        ranks = size.nodes * size.gpus_per_node
        assert size.offer.usd.middle == pytest.approx(2 * ranks * size.offer.hours.middle)


def test_json_output(make_plan):
    data = json.loads(json.dumps(make_plan("h100").as_data()))
    assert data["memory"]["total"] == sum(data["memory"]["parts"].values())
    assert data["batch"]["micro_batch_size"] * data["batch"]["gradient_accumulation_steps"] == 32
    assert all({"field", "value", "reason", "yours"} == set(item) for item in data["decisions"])
    assert data["offer"]["hours"]["low"] < data["offer"]["hours"]["high"]


def command(*arguments):
    code = (
        "import sys; from steadytrain.pipelines.cli import app\n"
        "try: app()\n"
        "finally: print([n for n in ('torch', 'transformers', 'kfp', 'mlflow', 'boto3') "
        "if n in sys.modules])"
    )
    line = [sys.executable, "-c", code, "plan", *arguments]
    return subprocess.run(line, capture_output=True, text=True)


@pytest.mark.slow
def test_command_needs_no_torch():
    done = command("causal-lm", "--gpu", "t4", "--formula")
    assert done.returncode == 0, done.stderr
    # The tokenizer counts the tokens of the first records.
    assert done.stdout.strip().endswith("['transformers']")
    assert "verdict   fits" in done.stdout
    assert "an estimate from the first" in done.stdout


@pytest.mark.slow
def test_command_makes_a_dry_run_if_torch_is_installed():
    smaller = "model.config.num_hidden_layers=1"
    done = command("causal-lm", "--gpu", "t4", "--json", "--set", smaller)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.rpartition("[")[0])["memory"]["by"] == "dry run"
    assert "--formula leaves it out" in done.stderr


@pytest.mark.slow
def test_exit_status_shows_that_the_plan_does_not_work():
    base = "model.base=hub:meta-llama/Llama-3.1-8B"
    done = command("chat", "--gpu", "rtx4050", "--set", base, "--json", "--formula")
    assert done.returncode == 1
    assert json.JSONDecoder().raw_decode(done.stdout)[0]["works"] is False


def test_slow_network_between_nodes_suggests_compression(make_plan):
    fields = {"model__base": SMALL, "model__adapter__kind": "none", "compute__strategy": "ddp"}

    def suggested(**changed):
        plan = make_plan("h100", 8, **{"nodes": 2, **fields, **changed})
        return [text for text in plan.remarks if "gradient_compression.kind=bf16" in text]

    assert suggested()
    assert not suggested(nodes=1)
    assert not suggested(compute__strategy="fsdp")
    assert not suggested(training__gradient_compression={"kind": "bf16"})
    # Enough work per step hides the exchange.
    assert not suggested(training__global_batch_size=16384)

"""Parameter groups: rates and decay by name and layer, frozen weights, and gradual unfreezing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from steadytrain.components.memory.groups import (
    frozen_names,
    grouped,
    layer_scales,
    treatments,
)
from steadytrain.components.memory.setting import Setting
from steadytrain.components.memory.shape import shape_of
from steadytrain.components.memory.states import states
from steadytrain.components.shared.config import TrainingConfig, from_mapping
from steadytrain.components.shared.errors import BadInput, ConfigError
from steadytrain.components.shared.events.types import TrainingStarted
from steadytrain.components.train.checkpoint import Checkpoint
from steadytrain.components.train.loop.optim import (
    OptimizerBuilder,
    build_scheduler,
    current_rate,
    set_rate,
)

from support import strategies
from support.strategies import RECIPE, Case, on_two_ranks
from support.training import LLAMA, events_of, exported, losses_of, weights_digest

MINIMAL = {"name": "tiny", "data": {"source": ["x"]}, "model": {"config": LLAMA}}
BERT = {
    "model_type": "bert",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 64,
}
EMBEDDINGS, LAST = "embed_tokens", r"layers\.1\."


def llama(**fields):
    torch.manual_seed(1)
    config = AutoConfig.for_model(**{**LLAMA, "vocab_size": 64, **fields})
    return AutoModelForCausalLM.from_config(config)


def training(*groups, **fields):
    return TrainingConfig(param_groups=list(groups), learning_rate=1e-2, **fields)


def test_first_matching_entry_decides_rate_and_decay_of_each_parameter():
    found = treatments(
        llama(),
        training(
            {"match": r"layers\.0\.mlp", "lr_scale": 0.1},
            {"match": r"layers\.0\.", "lr_scale": 0.5, "weight_decay": 0.3},
            weight_decay=0.2,
        ),
    )
    of = {name: (item.lr_scale, item.weight_decay) for name, item in found.items()}
    assert of["model.layers.0.mlp.up_proj.weight"] == (0.1, 0.2)
    assert of["model.layers.0.self_attn.q_proj.weight"] == (0.5, 0.3)
    # A weight decay that names a norm applies to it.
    assert of["model.layers.0.input_layernorm.weight"] == (0.5, 0.3)
    assert of["model.layers.1.input_layernorm.weight"] == (1.0, 0.0)
    assert of["lm_head.weight"] == (1.0, 0.2)


def of_beit(name, layers):
    """Return the layer's number as BEiT's get_num_layer_for_vit does, for BERT's names."""
    if ".embeddings." in name:
        return 0
    if ".layer." in name:
        return int(name.split(".layer.")[1].split(".")[0]) + 1
    return layers + 1


def test_layer_decay_is_that_of_beit():
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**BERT))
    found = layer_scales(model, 0.7)
    assert found == {
        name: pytest.approx(0.7 ** (3 - of_beit(name, 2))) for name, _ in model.named_parameters()
    }
    assert {round(scale, 4) for scale in found.values()} == {1.0, 0.7, 0.49, 0.343}


def test_updates_have_the_rate_of_their_group():
    """Each weight moves as with an optimizer of its own, with that rate and decay."""
    settings = training(
        {"match": EMBEDDINGS, "lr_scale": 0.25},
        {"match": LAST, "weight_decay": 0.5},
        weight_decay=0.1,
        layer_decay=0.5,
    )
    ours, theirs = llama(), llama()
    optimizer = OptimizerBuilder(settings)(ours)
    own = [
        torch.optim.AdamW([weight], 1e-2 * item.lr_scale, weight_decay=item.weight_decay)
        for weight, item in zip(
            theirs.parameters(), treatments(theirs, settings).values(), strict=True
        )
    ]
    for number in range(5):
        for model in (ours, theirs):
            generator = torch.Generator().manual_seed(number)
            for weight in model.parameters():
                weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()
        for each in own:
            each.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_groups_keep_their_ratio_through_the_schedule_and_a_lowered_rate():
    settings = training({"match": EMBEDDINGS, "lr_scale": 0.25}, layer_decay=0.5)
    optimizer = OptimizerBuilder(settings)(llama())
    scheduler = build_scheduler(optimizer, settings, 20)

    def ratios():
        return [
            group["lr"] / current_rate(scheduler) / group["lr_scale"]
            for group in optimizer.param_groups
        ]

    for _ in range(4):
        optimizer.step()
        scheduler.step()
    before = current_rate(scheduler)
    set_rate(scheduler, 1e-3)
    assert current_rate(scheduler) == pytest.approx(before / 10)
    assert ratios() == pytest.approx([1.0] * len(ratios()))
    optimizer.step()
    scheduler.step()
    assert ratios() == pytest.approx([1.0] * len(ratios()))
    assert len({group["lr"] for group in optimizer.param_groups}) > 3


@pytest.mark.parametrize(
    ("groups", "problem"),
    [
        ([{"match": "lm_haed"}], r"param_groups\.0\.match = 'lm_haed': it matches no parameter"),
        (
            [{"match": "mlp"}, {"match": "up_proj"}],
            r"param_groups\.1\.match = 'up_proj': it matches only what earlier entries match",
        ),
        ([{"match": ".", "unfreeze_at": 3}], "every parameter is frozen at the first step"),
        ([{"match": ".", "frozen": True}], "every parameter is frozen at the first step"),
    ],
)
def test_entries_that_do_not_fit_the_model_are_rejected(groups, problem):
    with pytest.raises(BadInput, match=problem):
        treatments(llama(), training(*groups))


@pytest.mark.slow
def test_pattern_that_would_search_for_years_is_an_error():
    endless = r"(([a-z_.0]|[a-z_.0])+)+[A-Z]"
    with pytest.raises(BadInput, match="takes more than 1 s") as error:
        treatments(llama(), training({"match": endless, "lr_scale": 2}))
    assert "a repetition" in error.value.remedy


def test_layer_decay_needs_layers():
    with pytest.raises(BadInput, match=r"layer_decay = 0\.5: Linear has no list of layers"):
        treatments(torch.nn.Linear(2, 2), training(layer_decay=0.5))


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"training": {"param_groups": [{"match": "("}]}}, "is not a regular expression"),
        (
            {"training": {"param_groups": [{"match": "a", "frozen": True, "lr_scale": 2}]}},
            "frozen parameters are never trained: leave out lr_scale",
        ),
        (
            {"training": {"param_groups": [{"match": "a", "unfreeze_at": 9}], "max_steps": 9}},
            "max_steps is 9, so they would never be trained",
        ),
        (
            {
                "training": {"param_groups": [{"match": "a", "unfreeze_at": 9}]},
                "compute": {"strategy": "fsdp"},
            },
            r"param_groups\.0\.unfreeze_at = '9': sharding decides at the start",
        ),
        (
            {
                "training": {"param_groups": [{"match": "a", "frozen": True}]},
                "compute": {"strategy": "zero1"},
            },
            "DeepSpeed keeps no 32-bit copy of frozen weights",
        ),
        (
            {
                "training": {"param_groups": [{"match": "a", "frozen": True}]},
                "model": {"base": "hub:x", "adapter": {"kind": "lora"}},
            },
            r"adapters freeze .*, and model\.adapter\.kind is lora",
        ),
        (
            {"training": {"param_groups": [{"match": "a", "unfreeze_at": 0.5}], "optim": "lamb"}},
            "it corrects its moments by the steps of a group",
        ),
    ],
)
def test_groups_that_cannot_work_are_rejected(sections, problem):
    with pytest.raises(ConfigError, match=problem):
        from_mapping({**MINIMAL, **sections})


def test_groups_are_in_the_identity_only_if_there_are_any():
    plain = from_mapping(MINIMAL)
    assert from_mapping({**MINIMAL, "training": {"param_groups": []}}).digest() == plain.digest()
    for changed in ({"param_groups": [{"match": "a"}]}, {"layer_decay": 0.9}):
        assert from_mapping({**MINIMAL, "training": changed}).digest() != plain.digest()


def test_planner_counts_no_gradient_and_no_state_of_frozen_parameters():
    model, settings = llama(), training({"match": EMBEDDINGS, "frozen": True})
    names = frozen_names(model, settings)
    assert names == ["model.embed_tokens.weight"]
    frozen = model.get_input_embeddings().weight.numel()
    assert [
        group.parameters for group in grouped(model, settings) if group.unfreeze_at is None
    ] == [frozen]
    shape = shape_of({**LLAMA, "vocab_size": 64})
    whole = states(shape, Setting(length=64, accumulates=True))
    found = states(replace(shape, frozen=frozen), Setting(length=64, accumulates=True))
    assert whole.weights == found.weights
    assert whole.gradients - found.gradients == 4 * frozen
    assert whole.optimizer - found.optimizer == 8 * frozen


UNFROZEN = {
    "param_groups": [
        {"match": EMBEDDINGS, "frozen": True},
        {"match": r"layers\.0\.", "unfreeze_at": 3},
        {"match": r"layers\.1\.", "unfreeze_at": 0.25},
    ],
    "layer_decay": 0.8,
    "save_steps": 1,
    "save_total_limit": 9,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("groups")


def test_frozen_weights_stay_and_the_others_begin_at_their_step(make_bench):
    bench = make_bench("whole", training=UNFROZEN)
    bench.train_here()
    saved = [
        Checkpoint.at(bench.workspace.checkpoints / f"step-{step:08d}") for step in range(1, 7)
    ]
    weights = [checkpoint.tensors("model") for checkpoint in saved]

    def first_change(name):
        return next(
            (n + 1 for n in range(1, 6) if not weights[n][name].equal(weights[n - 1][name])), None
        )

    assert first_change("model.embed_tokens.weight") is None
    # A quarter of 6 steps are 2.
    assert first_change("model.layers.1.mlp.up_proj.weight") == 3
    assert first_change("model.layers.0.mlp.up_proj.weight") == 4
    assert first_change("lm_head.weight") == 2
    states = [set(checkpoint.tensors("optimizer")) for checkpoint in saved]
    assert not [name for name in states[2] if "layers.0" in name or "embed" in name]
    assert [name for name in states[3] if "layers.0" in name]
    assert "model.embed_tokens.weight" in exported(bench)
    (event,) = events_of(bench.workspace, TrainingStarted)
    assert [group["unfreeze_at"] for group in event.groups] == [3.0, 0.25, 0.0, None]


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 3])
def test_run_resumes_to_the_same_bits_across_unfreezing(make_bench, step):
    settings = {**UNFROZEN, "averaging": {"kind": "ema", "decay": 0.5, "export": "averaged"}}
    whole, resumed = (make_bench(name, training=settings) for name in ("whole", "resumed"))
    whole.train_here()
    resumed.train_here(1, resume_from=whole.workspace.checkpoints / f"step-{step:08d}")
    assert weights_digest(resumed.workspace) == weights_digest(whole.workspace)


def test_micro_batch_halving_keeps_the_losses(make_bench):
    found = []
    for micro in (4, 2):
        bench = make_bench(f"micro-{micro}", training={**UNFROZEN, "micro_batch_size": micro})
        bench.train_here()
        found.append(losses_of(bench.workspace))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.slow
def test_two_ranks_learn_as_one(folder):
    changed = {name: UNFROZEN[name] for name in ("param_groups", "layer_decay")}
    frozen = {"param_groups": UNFROZEN["param_groups"][:1], "layer_decay": 0.8}
    cases, alone = [], {}
    for name, settings in (("ddp", changed), ("fsdp", frozen)):
        sections = {"training": {**RECIPE, **settings}}
        single = strategies.train(folder / f"single-{name}", **sections)
        alone[name] = {str(step): loss for step, loss in single.items()}
        cases.append(Case(name, name, f"single-{name}", sections=sections))
    found = on_two_ranks(folder, cases, "")
    for name, single in alone.items():
        assert found[name]["whole"] == pytest.approx(single, rel=1e-4)
        after = {step: loss for step, loss in found[name]["whole"].items() if int(step) > 10}
        assert found[name]["resumed"] == after

"""Regularization: what is rejected, what identifies a run, and what the plan counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from steadytrain.components.memory.peak import peak_memory
from steadytrain.components.memory.setting import Setting
from steadytrain.components.memory.shape import shape_of
from steadytrain.components.shared.config import AdapterConfig, from_mapping
from steadytrain.components.shared.errors import ConfigError
from steadytrain.components.sizing.time_cost import flops_per_token
from steadytrain.components.tasks.checks import check_task

from support.training import GPT2, LLAMA, VOCABULARY


def configure(task="sequence_classification", *, model=None, **training):
    return from_mapping(
        {
            "name": "tiny",
            "data": {"source": ["unused"], "task": task},
            "model": model or {"config": GPT2},
            "training": training,
        }
    )


def test_what_is_off_leaves_a_runs_identity_alone():
    plain = configure().run_id
    assert configure(r_drop={"weight": 0}, focal_loss={}, class_weights={}).run_id == plain
    assert configure(model={"config": GPT2, "dropout": {}}).run_id == plain
    changes = [
        {"r_drop": {"weight": 1}},
        {"focal_loss": {"gamma": 2}},
        {"class_weights": {"kind": "balanced"}},
        {"model": {"config": GPT2, "dropout": {"hidden": 0.1}}},
    ]
    assert len({plain, *(configure(**change).run_id for change in changes)}) == 5


@pytest.mark.parametrize(
    ("training", "problem"),
    [
        ({"r_drop": {"weight": -1}}, r"training\.r_drop\.weight = -1"),
        ({"focal_loss": {"gamma": -2}}, r"training\.focal_loss\.gamma = -2"),
        ({"adversarial": {"kind": "pgd", "epsilon": 1e39}}, r"adversarial\.epsilon = 1e\+39"),
        ({"adversarial": {"kind": "pgd", "alpha": 1e39}}, r"adversarial\.alpha = 1e\+39"),
        ({"class_weights": {"given": {"a": 1}}}, r"class_weights\.kind is none"),
        ({"class_weights": {"kind": "given"}}, "give the weight of each label"),
        ({"class_weights": {"kind": "given", "given": {"a": 0}}}, r"class_weights\.given\.a = 0"),
        (
            {"r_drop": {"weight": 1}, "distillation": {"teacher": "x"}},
            r"training\.r_drop .*training\.distillation is on",
        ),
        (
            {"r_drop": {"weight": 1}, "batch_contrastive": {"rows": 4}},
            r"training\.batch_contrastive .*training\.r_drop is on",
        ),
    ],
)
def test_what_cannot_work_is_rejected(training, problem):
    with pytest.raises(ConfigError, match=problem):
        configure(**training)


def test_language_models_have_no_classes_to_weigh():
    check_task(configure("causal_lm", r_drop={"weight": 1}, focal_loss={"gamma": 2}))
    with pytest.raises(ConfigError, match=r"class_weights.*causal_lm does not include it"):
        check_task(configure("causal_lm", class_weights={"kind": "balanced"}))


def test_losses_that_compare_texts_are_not_attacked():
    attacked = {"adversarial": {"kind": "fgm"}}
    for task in ("masked_lm", "causal_lm", "supervised_finetuning", "denoising"):
        check_task(configure(task, **attacked))
    for task in ("preference", "unpaired_preference", "text_embedding"):
        with pytest.raises(ConfigError, match=rf"adversarial.*{task} does not include it"):
            check_task(configure(task, model={"base": "folder:x"}, **attacked))


@pytest.mark.parametrize("labels", [0, 3])
def test_the_plan_counts_both_passes(labels):
    shape = shape_of({**LLAMA, "vocab_size": VOCABULARY}, labels=labels)
    plain = Setting(length=32, micro_batch=4, masked=labels > 0)
    two_passes = replace(plain, copies=2)
    larger = replace(plain, micro_batch=8)
    assert peak_memory(shape, two_passes) == peak_memory(shape, larger)
    assert flops_per_token(shape, two_passes) == 2 * flops_per_token(shape, plain)


@pytest.mark.parametrize(
    ("vocabulary", "hidden", "copies", "measured"),
    [(8192, 192, 1, 1.15), (8192, 192, 2, 2.63), (32_768, 96, 1, 1.28), (32_768, 96, 2, 3.44)],
)
def test_the_plan_counts_the_work_on_a_language_models_logits(vocabulary, hidden, copies, measured):
    """Measured by tests/bench/test_robust_training.py: CPU time relative to the plain loss."""
    fields = {"vocab_size": vocabulary, "hidden_size": hidden, "num_attention_heads": 6}
    fields |= {"num_hidden_layers": 4, "intermediate_size": 512, "num_key_value_heads": 6}
    shape = shape_of({**LLAMA, **fields})
    plain = Setting(length=128, micro_batch=8, cuda=False)
    own = replace(plain, copies=copies, differentiates=True)
    found = flops_per_token(shape, own) / flops_per_token(shape, plain)
    assert found == pytest.approx(measured, rel=0.05)
    # In 16 bits, a GPU has less bandwidth for its arithmetic, and a classifier has no such logits.
    on_gpu = replace(own, cuda=True, precision="bf16")
    assert flops_per_token(shape, on_gpu) > flops_per_token(shape, own)
    labeled = shape_of({**LLAMA, **fields}, labels=3)
    assert flops_per_token(labeled, own) == copies * flops_per_token(labeled, plain)


def test_given_weights_are_those_of_the_labels():
    content = {
        "name": "tiny",
        "data": {"source": ["x"], "task": "sequence_classification", "labels": ["a", "b"]},
        "model": {"config": GPT2},
    }
    for given, fits in (({"a": 1, "b": 2}, True), ({"a": 1, "c": 2}, False)):
        training = {"class_weights": {"kind": "given", "given": given}}
        if fits:
            from_mapping({**content, "training": training})
        else:
            with pytest.raises(ConfigError, match=r"data\.labels are a, b"):
                from_mapping({**content, "training": training})


@pytest.mark.parametrize(
    ("kind", "passes", "ascents", "factor"),
    [("fgm", 2, 0, 2), ("pgd", 1, 3, 3), ("freelb", 3, 0, 3)],
)
def test_the_plan_counts_adversarial_passes(kind, passes, ascents, factor):
    adversarial = configure(adversarial={"kind": kind}).training.adversarial
    assert (adversarial.passes, adversarial.ascents) == (passes, ascents)
    shape = shape_of({**LLAMA, "vocab_size": VOCABULARY}, labels=3)
    plain = Setting(length=32, micro_batch=4, masked=True)
    attacked = replace(plain, passes=passes, ascents=ascents)
    assert flops_per_token(shape, attacked) == pytest.approx(factor * flops_per_token(shape, plain))
    assert peak_memory(shape, attacked).activations > peak_memory(shape, plain).activations


@pytest.mark.parametrize("differentiates", [False, True])
def test_the_plan_counts_the_logits_of_each_adversarial_pass(differentiates):
    shape = shape_of({**LLAMA, "vocab_size": 32_000})
    one = Setting(length=32, micro_batch=4, cuda=False, differentiates=differentiates)
    plain = flops_per_token(shape, one)
    assert flops_per_token(shape, replace(one, passes=2)) == pytest.approx(2 * plain)


def test_the_plan_counts_the_heads_gradient_in_a_search():
    """It comes with the loss. The search needs no gradients of other weights."""
    shape = shape_of({**LLAMA, "vocab_size": 32_000})
    one = Setting(length=32, micro_batch=4, cuda=False)
    plain, head = flops_per_token(shape, one), shape.hidden * shape.vocabulary
    searching = flops_per_token(shape, replace(one, ascents=3))
    assert searching == pytest.approx(plain + 3 * (2 / 3 * plain + 2 * head))
    frozen = replace(one, adapter=AdapterConfig(kind="lora"))
    ratio = flops_per_token(shape, replace(frozen, ascents=3)) / flops_per_token(shape, frozen)
    assert ratio == pytest.approx(4, rel=0.05)


def test_the_plan_counts_blocks_of_logits():
    shape = shape_of({**LLAMA, "vocab_size": 32_000})
    plain = Setting(length=128, micro_batch=2)
    assert (
        peak_memory(shape, replace(plain, differentiates=True)).logits
        > peak_memory(shape, plain).logits
    )

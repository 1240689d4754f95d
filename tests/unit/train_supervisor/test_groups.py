"""What is wrong with groups of parameters or weights of classes is found before ranks start."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tasks.base import OpenTask
from steadytrain.components.train import step
from steadytrain.components.train.loop import outline
from steadytrain.components.train.loop.setup import build_module
from steadytrain.components.train.step import check_groups

from support.training import (
    CLASSES,
    LLAMA,
    Bench,
    class_rows,
    language_rows,
    write_data,
    write_parts,
    write_tokenizer,
)
from support.weight_digests import BERT

ALL_FROZEN = [{"match": ".", "frozen": True}]
TYPO = [{"match": "lm_haed", "lr_scale": 2}]


def classes(folder):
    return write_data(
        folder,
        class_rows(20),
        class_rows(4),
        task="sequence_classification",
        schema=CLASSES,
        labels=["a", "b", "c"],
    )


def language(folder, task="causal_lm"):
    return write_data(folder, language_rows(20), language_rows(4), task=task)


CASES = {
    "causal_lm": (language, {}),
    "sequence_classification": (classes, {}),
    "sequence_classification of bert": (classes, {"model": {"config": BERT}}),
    "multi_task": (write_parts, {"training": {"multi_task": {"loss_weighting": "uncertainty"}}}),
    "masked_lm": (lambda folder: language(folder, "masked_lm"), {"model": {"config": BERT}}),
    "denoising": (lambda folder: language(folder, "denoising"), {}),
    "text_embedding": (
        lambda folder: language(folder, "text_embedding"),
        {"model": {"config": BERT}, "training": {"batch_contrastive": {"rows": 2}}},
    ),
}


def shapes(model):
    return {
        name: (tuple(item.shape), item.requires_grad) for name, item in model.named_parameters()
    }


def outlined(bench):
    task = OpenTask(bench.config, bench.data).training
    with torch.device("meta"):
        return build_module(bench.config, task)


@pytest.fixture
def base(tmp_path):
    """Write a base model."""
    from transformers import AutoConfig

    folder = tmp_path / "base"
    write_tokenizer(folder)
    config = AutoConfig.for_model(**{**LLAMA, "vocab_size": 64})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_outline_of_a_new_model_has_the_parameters_that_ranks_train(tmp_path, case):
    data, sections = CASES[case]
    bench = Bench.make(tmp_path, data(tmp_path / "data"), **sections)
    outline = outlined(bench)
    assert {item.device.type for item in outline.parameters()} == {"meta"}
    built = build_module(bench.config, OpenTask(bench.config, bench.data).training)
    assert shapes(outline) == shapes(built)


@pytest.mark.parametrize("kind", ["none", "lora"])
@pytest.mark.parametrize("data", [language, classes])
def test_outline_of_a_base_model_has_the_parameters_that_ranks_train(tmp_path, base, kind, data):
    model = {"base": str(base), "adapter": {"kind": kind}}
    bench = Bench.make(tmp_path, data(tmp_path / "data"), model=model)
    outline = outlined(bench)
    built = build_module(bench.config, OpenTask(bench.config, bench.data).training)
    assert shapes(outline) == shapes(built)


@pytest.mark.parametrize(
    ("training", "problem"),
    [
        ({"param_groups": ALL_FROZEN}, "training.param_groups: every parameter is frozen at the"),
        ({"param_groups": [{"match": "lm_head", "lr_scale": 2}], "layer_decay": 0.9}, ""),
    ],
)
def test_groups_are_checked_against_the_model(tmp_path, training, problem):
    bench = Bench.make(tmp_path, language(tmp_path / "data"), training=training)
    content = {"config": bench.config.model_dump(mode="json"), "data": bench.data.model_dump()}
    assert outline.check(content).get("message", "")[: len(problem) or None] == problem


@pytest.mark.slow
def test_groups_that_do_not_fit_the_model_start_no_rank(tmp_path):
    training = {"param_groups": TYPO}
    bench = Bench.make(tmp_path, language(tmp_path / "data"), training=training)
    with pytest.raises(BadInput, match=r"groups\.0\.match = 'lm_haed': it matches no parameter"):
        step.run(bench.config, bench.data)
    assert not bench.workspace.attempts.exists()
    assert not list(bench.workspace.events.glob("ledger-*"))


@pytest.mark.slow
def test_what_only_ranks_can_know_is_left_to_them(tmp_path):
    """Here: the files of a base model, which are damaged."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{")
    model = {"base": str(tmp_path / "base")}
    training = {"param_groups": TYPO}
    bench = Bench.make(tmp_path, language(tmp_path / "data"), model=model, training=training)
    check_groups(bench.config, bench.data)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"a": 1, "b": 2}, "'c' has no weight"),
        ({"a": 1, "b": 2, "c": 1, "d": 1}, "'d' is not a label"),
    ],
)
def test_weights_of_other_classes_start_no_rank(tmp_path, given, problem):
    weights = {"class_weights": {"kind": "given", "given": given}}
    bench = Bench.make(tmp_path, classes(tmp_path / "data"), training=weights)
    with pytest.raises(BadInput, match=problem):
        step.run(bench.config, bench.data)
    assert not bench.workspace.attempts.exists()

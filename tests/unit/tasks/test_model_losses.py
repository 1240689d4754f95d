"""Fields of a model that act only inside Transformers' loss are applied as there, or rejected."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from transformers.models.auto import modeling_auto as auto

from steadytrain.components.preprocess.model import find_model
from steadytrain.components.shared.errors import BadInput, ConfigError
from steadytrain.components.tasks.base import OpenTask
from steadytrain.components.tasks.checks import check_task
from steadytrain.components.tasks.model_fields import NGRAM_LOSS, ROUTER_LOSS, Z_LOSS

from support import routed
from support.forked import on_ranks
from support.training import Bench, language_rows, write_data, write_tokenizer

MODELS = Path(transformers.__file__).parent / "models"
PARTS = {
    "router": r"aux_loss_coef \* aux_loss",
    "z": r"z_loss_coefficient \* z_loss",
    "n-gram": r"self\._compute_loss\(",
}
PLAIN = re.compile(
    r"(\w*loss|criterion)\w* = None"
    r"|(\w*loss\w*|criterion) = .*(self\.loss_function|loss_fct|loss_fn|loss_func|criterion)\("
    r"|(loss_fct|loss_fn|loss_func|criterion) = .*Loss\("
    r"|\w*loss = (mlm_loss|mep_loss|loss \+ mep_loss)"  # LUKE: its entities have no labels here.
    r"|loss = -\(\(log_softmax\(logits\) \* labels\)"  # DeBERTa: labels that are numbers.
    r"|loss = torch\.tensor\(0\)|accepts_loss_kwargs = "
    r"|aux_loss = (None|load_balancing_loss_func\()"
    r"|z_loss = logits\.logsumexp"
    r"|loss = (torch\.zeros|loss / self\.config\.num_codebooks)|loss \+= loss_fct\("  # Music.
)
LOSSES = {
    "language": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "classes": auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
}


@pytest.fixture(scope="module")
def classes():
    """Return the source of each class of Transformers' models."""
    found = {}
    for path in MODELS.glob("*/modeling_*.py"):
        for part in re.split(r"(?m)^(?=class )", path.read_text(encoding="utf-8"))[1:]:
            found[re.match(r"class (\w+)", part)[1]] = part
    return found


def losses_in(source):
    """Yield the statements of a class that make its loss, each on one line."""
    body = re.sub(r'"""[\s\S]*?"""', "", source)
    yield from re.findall(r"(?m)^ +(\w*(?:loss|criterion)\w* (?:\+=|=) .*)$", body)


def families(classes, kind, part):
    """Return the families whose model of a kind has something in its loss."""
    found = set()
    for family, names in LOSSES[kind].items():
        for name in [names] if isinstance(names, str) else names:
            if any(re.search(PARTS[part], line) for line in losses_in(classes.get(name, ""))):
                found.add(family)
    return found


def test_families_with_more_in_their_loss_are_all_known(classes):
    assert families(classes, "language", "router") == ROUTER_LOSS
    assert families(classes, "language", "z") == Z_LOSS
    assert families(classes, "language", "n-gram") == NGRAM_LOSS
    for kind, part in [(kind, part) for kind in ("masked", "classes") for part in PARTS]:
        assert not families(classes, kind, part)


def test_no_loss_of_transformers_has_a_part_that_is_not_known(classes):
    unknown = {
        (family, line)
        for names in LOSSES.values()
        for family, name in names.items()
        if family not in NGRAM_LOSS
        for each in ([name] if isinstance(name, str) else name)
        for line in losses_in(classes.get(each, ""))
        if not PLAIN.match(line) and not any(re.search(part, line) for part in PARTS.values())
    }

    assert sorted(unknown) == []


@pytest.mark.parametrize("micro_batch", [8, 2])
@pytest.mark.parametrize("family", routed.FAMILIES)
def test_router_loss_is_that_of_transformers(tmp_path, family, micro_batch):
    model = {"model_type": family, **routed.FAMILIES[family]}

    ours = routed.by_us(tmp_path, model, micro_batch)

    agree(ours, routed.by_transformers(tmp_path, model))


def test_router_loss_with_recomputed_activations(tmp_path):
    model = {"model_type": "mixtral", **routed.FAMILIES["mixtral"]}

    ours = routed.by_us(tmp_path, model, 4, gradient_checkpointing=True)

    agree(ours, routed.by_transformers(tmp_path, model))


def test_router_loss_where_attention_needs_padding(tmp_path):
    """Padding is no part of the balance."""
    fields = {**routed.FAMILIES["mixtral"], "attn_implementation": "eager"}
    model = {"model_type": "mixtral", **fields}

    ours = routed.by_us(tmp_path, model, 4)

    agree(ours, routed.by_transformers(tmp_path, model))


@pytest.mark.long
def test_router_loss_on_two_ranks(tmp_path):
    model = {"model_type": "mixtral", **routed.FAMILIES["mixtral"]}

    on_ranks(2, routed.on_rank, tmp_path, model, 2)

    agree(torch.load(tmp_path / "found.pt"), routed.by_transformers(tmp_path, model))


def test_router_loss_is_off_without_its_switch(tmp_path):
    fields = {**routed.FAMILIES["mixtral"], "output_router_logits": False}
    model = {"model_type": "mixtral", **fields}

    ours = routed.by_us(tmp_path, model, 4)

    agree(ours, routed.by_transformers(tmp_path, model))


def agree(ours, theirs):
    (loss, gradients), (their_loss, their_gradients) = ours, theirs
    assert loss == pytest.approx(their_loss, rel=1e-5)
    assert gradients.keys() == their_gradients.keys()
    for name, gradient in their_gradients.items():
        largest = max(gradient.abs().max().item(), 1e-3)
        assert (gradients[name] - gradient).abs().max() <= 1e-5 * largest, name


SMALL = {"model_type": "llama"}


@pytest.mark.parametrize(
    ("task", "config", "field"),
    [
        ("causal_lm", {"model_type": "mixtral", "router_aux_loss_coef": 5.0}, "router_aux"),
        ("causal_lm", {"model_type": "llama4_text", "router_aux_loss_coef": 5.0}, "router_aux"),
        ("causal_lm", {"model_type": "bamba", "z_loss_coefficient": 1e-4}, "z_loss_coefficient"),
        ("causal_lm", {"model_type": "prophetnet"}, "model_type"),
        ("causal_lm", {"model_type": "glm4_moe", "num_mtp_layers": 1}, "num_mtp_layers"),
        ("causal_lm", {**SMALL, "problem_type": "regression"}, "problem_type"),
        (
            "sequence_classification",
            {**SMALL, "problem_type": "multi_label_classification"},
            "problem_type",
        ),
        ("sequence_classification", {**SMALL, "id2label": {"0": "a", "1": "b"}}, "id2label"),
        (
            "sequence_classification",
            {"model_type": "mixtral", "output_router_logits": True},
            "output_router_logits",
        ),
    ],
)
def test_a_field_without_effect_is_rejected_by_name(tmp_path, task, config, field):
    data = write_data(tmp_path / "data", language_rows(2), [], task=task)
    bench = Bench.make(tmp_path, data, model={"config": config})

    with pytest.raises(ConfigError, match=rf"model\.config\.{field}"):
        check_task(bench.config)


@pytest.mark.parametrize(
    ("task", "content", "message"),
    [
        ("causal_lm", {"model_type": "bamba", "z_loss_coefficient": 1e-4}, "z_loss_coefficient"),
        ("preference", {"model_type": "mixtral", "output_router_logits": True}, "router loss"),
        (
            "sequence_classification",
            {"model_type": "bert", "problem_type": "multi_label_classification"},
            "one label of each record",
        ),
    ],
)
def test_a_base_with_a_field_without_effect_is_rejected(tmp_path, task, content, message):
    base = tmp_path / "base"
    write_tokenizer(base)
    (base / "config.json").write_text(json.dumps(content))
    (base / "model.safetensors").touch()
    data = write_data(tmp_path / "data", language_rows(2), [], task=task)
    bench = Bench.make(tmp_path, data, model={"base": str(base)})

    with pytest.raises(BadInput, match=message):
        find_model(bench.config)


def test_a_base_whose_router_loss_is_off_is_accepted(tmp_path):
    """Saved configurations list the coefficient, whether it counts or not."""
    base = tmp_path / "base"
    write_tokenizer(base)
    content = {"model_type": "mixtral", "router_aux_loss_coef": 0.02, "vocab_size": 64}
    (base / "config.json").write_text(json.dumps(content))
    (base / "model.safetensors").touch()
    data = write_data(tmp_path / "data", language_rows(2), [])

    find_model(Bench.make(tmp_path, data, model={"base": str(base)}).config)


def test_a_model_without_the_router_loss_that_its_configuration_turns_on(tmp_path):
    dense = {
        "model_type": "doge",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "output_router_logits": True,
    }
    data = write_data(tmp_path / "data", language_rows(2), [])
    task = OpenTask(Bench.make(tmp_path, data, model={"config": dense}).config, data).training

    with pytest.raises(BadInput, match="returns no router loss"):
        task.ready(task.build_model())

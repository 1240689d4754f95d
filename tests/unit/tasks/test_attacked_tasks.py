"""Adversarial training of each task equals the papers' algorithms, in double precision."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.config.adversarial import AdversarialConfig
from steadytrain.components.tasks.masked_lm import MaskedLanguageModel
from steadytrain.components.tasks.multi_task import MultiTaskClassification
from steadytrain.components.tasks.packing import IGNORED

from support.attacking import attacked_loss, trained
from support.training import VOCABULARY
from support.weight_digests import BERT

KINDS = {
    "fgm": {"kind": "fgm"},
    "pgd": {"kind": "pgd", "steps": 4, "alpha": 0.4},
    "freelb": {"kind": "freelb", "steps": 3, "alpha": 0.7},
}
SIZES = {"l2": 0.9, "linf": 0.05}


def attack_of(kind, norm):
    return AdversarialConfig(**KINDS[kind], norm=norm, epsilon=SIZES[norm])


def check_gradients(model, expected):
    """Check the gradients that training left against those of a loss of the same weights."""
    named = dict(model.named_parameters())
    theirs = torch.autograd.grad(expected, list(named.values()))
    for (name, parameter), gradient in zip(named.items(), theirs, strict=True):
        # Losses and perturbations are rounded to 32 bits.
        torch.testing.assert_close(
            parameter.grad.double(), gradient.double(), rtol=1e-3, atol=1e-5, msg=name
        )


LABELS = ["mood/bad", "mood/good", "topic/art", "topic/law", "topic/sport"]
HEADS = {"mood": slice(0, 2), "topic": slice(2, 5)}


def several(weighting):
    parts = {name: {"source": [f"{name}.jsonl"]} for name in HEADS}
    content = {
        "name": "tiny",
        "data": {"task": "multi_task", "parts": parts},
        "model": {"config": BERT},
        "training": {"multi_task": weighting},
        "gate": {"max_slice_regression": 0.02},
    }
    return MultiTaskClassification(
        from_mapping(content), SimpleNamespace(labels=LABELS, task="multi_task")
    )


@pytest.mark.parametrize("norm", SIZES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "weighting", [{"loss_weights": {"mood": 0.5, "topic": 3.0}}, {"loss_weighting": "uncertainty"}]
)
def test_several_data_sets_learn_as_the_papers_say(weighting, kind, norm):
    """The logarithm of a row's variance counts once, however many passes the row has."""
    task, how = several(weighting), attack_of(kind, norm)
    fields = {**BERT, "vocab_size": VOCABULARY, "num_labels": len(LABELS)}
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**fields))
    model = model.double().eval()
    task.extend(model)
    if task.learns_weights:
        model.uncertainty.double().log_variances.data = torch.tensor([0.4, -0.7]).double()
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]])
    ids = torch.randint(2, VOCABULARY, mask.shape) * mask
    targets = torch.tensor([0, 3, 4, 1])
    batch = {"input_ids": ids, "attention_mask": mask, "targets": targets}
    table = model.get_input_embeddings()

    def loss(perturbation):
        embedded = table(ids) + perturbation
        logits = model(inputs_embeds=embedded, attention_mask=mask).logits
        total = logits.new_zeros(())
        for index, (part, head) in enumerate(HEADS.items()):
            mine = (head.start <= targets) & (head.stop > targets)
            own = functional.cross_entropy(
                logits[mine][:, head], targets[mine] - head.start, reduction="sum"
            )
            if task.learns_weights:
                variance = model.uncertainty.log_variances[index]
                total = total + own / variance.exp() + int(mine.sum()) * variance / 2
            else:
                total = total + weighting["loss_weights"][part] * own
        return total

    expected = attacked_loss(table(ids).detach() * 0, how, loss)
    found = trained(model, task, batch, how)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    check_gradients(model, expected)


def configure(task, architecture, **training):
    return from_mapping(
        {
            "name": "tiny",
            "data": {"source": ["unused"], "task": task},
            "model": {"config": architecture},
            "training": training,
        }
    )


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("norm", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_masked_tokens_learn_as_the_papers_say(kind, norm, fused):
    """The head is tied to the embeddings, and computes the loss itself if it is fused."""
    task = MaskedLanguageModel(configure("masked_lm", BERT, label_smoothing_factor=0.1), None)
    how = attack_of(kind, norm)
    fields = {**BERT, "vocab_size": VOCABULARY}
    model = AutoModelForMaskedLM.from_config(AutoConfig.for_model(**fields)).double().eval()
    if fused:
        assert task.ready(model) == []
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    ids = torch.randint(2, VOCABULARY, mask.shape) * mask
    targets = torch.full(mask.shape, IGNORED)
    targets[0, 1], targets[0, 4], targets[1, 2] = 7, 9, 11
    batch = {"input_ids": ids, "attention_mask": mask, "targets": targets}
    table = model.get_input_embeddings()

    def loss(perturbation):
        logits = model(inputs_embeds=table(ids) + perturbation, attention_mask=mask).logits
        return functional.cross_entropy(
            logits.flatten(0, 1),
            targets.flatten(),
            ignore_index=IGNORED,
            reduction="sum",
            label_smoothing=0.1,
        )

    expected = attacked_loss(table(ids).detach() * 0, how, loss)
    found = trained(model, task, batch, how)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    check_gradients(model, expected)

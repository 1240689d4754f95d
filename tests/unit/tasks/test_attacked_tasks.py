"""Adversarial training of each task equals the papers' algorithms, in double precision."""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

from steadytrain.components.shared.config import from_mapping
from steadytrain.components.tasks.causal_lm import SupervisedFineTuning
from steadytrain.components.tasks.frozen_parts import HostEmbedding
from steadytrain.components.tasks.masked_lm import MaskedLanguageModel
from steadytrain.components.tasks.multi_task import MultiTaskClassification
from steadytrain.components.techniques.adversarial_training import AdversarialConfig
from steadytrain.components.techniques.adversarial_training.attack import (
    ascended,
    perturbed,
    search,
    texts_of,
)
from steadytrain.components.techniques.base import IGNORED

from support.attacking import attacked_loss, trained
from support.training import LLAMA, VOCABULARY, write_data
from support.weight_digests import BERT

KINDS = {
    "fgm": {"kind": "fgm"},
    "pgd": {"kind": "pgd", "steps": 4, "alpha": 0.4},
    "freelb": {"kind": "freelb", "steps": 3, "alpha": 0.7},
}
SIZES = {"l2": 0.9, "linf": 0.05}


def attack_of(kind, norm):
    return AdversarialConfig(**KINDS[kind], norm=norm, epsilon=SIZES[norm])


def check_gradients(model, expected, exact=None):
    """Check the gradients that training left against those of a loss, of the same weights."""
    named = dict(model.named_parameters())
    theirs = torch.autograd.grad(expected, list((exact or model).parameters()))
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


ROWS = [[5, 2, 4], [7, 3]]
"""Lengths of the documents of packed rows."""
LAYOUTS = {
    "one row without padding": {"packed": True, "by_document": True},
    "rows with padding": {"packed": True, "by_document": False},
    "one document in a row": {"packed": False, "by_document": False},
}


@pytest.fixture(scope="module")
def tokenized(tmp_path_factory):
    """Return data that has a tokenizer."""
    return write_data(tmp_path_factory.mktemp("data"), [], [])


@pytest.fixture
def language(tokenized):
    """Return a task, its model, and packed rows."""
    task = SupervisedFineTuning(configure("causal_lm", LLAMA), tokenized)
    fields = AutoConfig.for_model(**LLAMA, vocab_size=VOCABULARY)
    model = AutoModelForCausalLM.from_config(fields).eval()
    assert task.ready(model) == []
    generator = torch.Generator().manual_seed(2)
    rows = []
    for lengths in ROWS:
        ids = torch.randint(2, VOCABULARY, (sum(lengths),), generator=generator)
        # Some tokens are not predicted, as in a conversation.
        targets = torch.rand(len(ids), generator=generator) < 0.8
        rows.append({"input_ids": ids.numpy(), "targets": targets.numpy(), "lengths": lengths})
    return task, model, rows


def arranged(task, rows, layout):
    for name, value in LAYOUTS[layout].items():
        setattr(task, name, value)
    return task.collate(rows)


def documents_of(rows):
    """Yield the tokens of each document, and which of them are predicted."""
    for row in rows:
        start = 0
        for length in row["lengths"]:
            place = slice(start, start + length)
            yield (torch.from_numpy(row[name][place])[None] for name in ("input_ids", "targets"))
            start += length


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("norm", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_learn_as_if_each_were_a_text(language, kind, norm, layout):
    (task, model, rows), how = language, attack_of(kind, norm)
    exact = copy.deepcopy(model).double()
    table, expected = exact.get_input_embeddings(), 0.0
    for ids, predicted in documents_of(rows):
        targets = torch.where(predicted, ids, IGNORED)[:, 1:]

        def loss(perturbation, ids=ids, targets=targets):
            logits = exact(inputs_embeds=table(ids) + perturbation).logits[:, :-1]
            return functional.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
            )

        expected = expected + attacked_loss(table(ids).detach() * 0, how, loss)
    found = trained(model, task, arranged(task, rows, layout), how)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    check_gradients(model, expected, exact)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("norm", SIZES)
def test_the_perturbation_of_a_document_does_not_depend_on_the_rest_of_its_row(
    language, norm, layout
):
    (task, model, rows), how = language, attack_of("pgd", norm)

    def found_in(batch):
        worst = search(model, batch, how, lambda: task.compute_loss(model, batch).total).detach()
        positions = batch["position_ids"].flatten()
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(positions)]
        flat = worst.flatten(0, 1)
        return [flat[start:end] for start, end in itertools.pairwise(starts)]

    together = found_in(arranged(task, rows, layout))
    documents = [
        {"input_ids": ids[0].numpy(), "targets": wanted[0].numpy(), "lengths": [ids.shape[1]]}
        for ids, wanted in documents_of(rows)
    ]
    alone = [found_in(arranged(task, [each], layout))[0] for each in documents]
    unseen = [each for each in together if not each.any()]
    seen = [each for each in together if each.any()]
    for mine, theirs in zip(seen, [each for each in alone if each.any()], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
        size = mine.norm(p=2 if norm == "l2" else torch.inf)
        assert how.epsilon / 2 < size.item() < how.epsilon * (1 + 1e-6)
    if layout == "one row without padding":
        assert not unseen


def test_padding_is_not_perturbed(language):
    task, model, rows = language
    for layout, padded in (("rows with padding", [(1, 10)]), ("one document in a row", [(1, 2)])):
        batch = arranged(task, rows, layout)
        worst = search(
            model, batch, attack_of("pgd", "linf"), lambda b=batch: loss_of(task, model, b)
        )
        for row, start in padded:
            assert not worst[row, start:].any()
            assert worst[row, : start - 1].any()


def loss_of(task, model, batch):
    return task.compute_loss(model, batch).total


@pytest.mark.parametrize("norm", SIZES)
@pytest.mark.parametrize("value", [0.0, torch.inf, torch.nan])
def test_a_document_without_a_direction_keeps_its_perturbation(norm, value):
    texts = texts_of({"position_ids": torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]])})
    start, gradient = torch.full((2, 5, 4), 0.01), torch.randn(2, 5, 4)
    gradient[0, 3:] = value
    if value:
        gradient[0, 4] = 1.0
    found = ascended(start, gradient, attack_of("pgd", norm), texts)
    assert found[0, 3:].equal(start[0, 3:])
    for place in ((0, slice(0, 3)), (1, slice(0, 1)), (1, slice(1, 5))):
        assert found[place].isfinite().all()
        assert not found[place].equal(start[place])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_half_precision_has_perturbations_in_32_bits(tokenized, language, layout, kind):
    """As autocast computes, and with weights in 16 bits, as sharding strategies keep them."""
    _, _, rows = language
    fields = AutoConfig.for_model(**LLAMA, vocab_size=VOCABULARY)
    how = attack_of(kind, "l2")
    for weights in (torch.float32, torch.bfloat16):
        task = SupervisedFineTuning(configure("causal_lm", LLAMA), tokenized)
        model = AutoModelForCausalLM.from_config(fields).to(weights).eval()
        task.ready(model)
        batch = arranged(task, rows, layout)
        with torch.autocast("cpu", torch.bfloat16):
            worst = search(model, batch, how, lambda t=task, m=model, b=batch: loss_of(t, m, b))
            loss = trained(model, task, batch, how)
        assert worst.dtype == torch.float32
        assert worst.isfinite().all()
        assert worst.any()
        assert loss.isfinite()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_embeddings_on_the_host_are_perturbed(language):
    task, model, rows = language
    batch = arranged(task, rows, "one row without padding")
    how = attack_of("pgd", "l2")
    expected = search(model, batch, how, lambda: loss_of(task, model, batch))
    model.set_input_embeddings(HostEmbedding(model.get_input_embeddings()))
    found = search(model, batch, how, lambda: loss_of(task, model, batch))
    torch.testing.assert_close(found, expected)
    with torch.no_grad(), perturbed(model, found):
        assert loss_of(task, model, batch).isfinite()

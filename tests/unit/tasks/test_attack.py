"""Attacks on embeddings equal the papers' algorithms, written out in double precision."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.errors import ConfigError
from steadytrain.components.tasks.base import LossSum
from steadytrain.components.tasks.sequence_classification import class_loss
from steadytrain.components.techniques.adversarial_training import (
    AdversarialConfig,
    AttackConfig,
)
from steadytrain.components.techniques.adversarial_training.attack import (
    ascended,
    perturbed,
    search,
)

from support.attacking import attacked_loss, passes_of, stepped, trained
from support.weight_digests import BERT


def attack(kind="pgd", **fields):
    return AdversarialConfig(kind=kind, **fields)


def model_and_batch(dropout=0.0):
    torch.manual_seed(0)
    fields = {
        **BERT,
        "vocab_size": 30,
        "num_labels": 3,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
    }
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**fields)).double()
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
    batch = {
        "input_ids": torch.randint(1, 30, (3, 5)) * mask,
        "attention_mask": mask,
        "targets": torch.tensor([0, 2, 1]),
    }
    return model, batch


def plain_gradients(model, batch, how):
    """Return the gradients of weights as the papers compute them, on complete embeddings."""
    table = model.get_input_embeddings()
    inputs = {"attention_mask": batch["attention_mask"]}

    def loss(perturbation):
        embedded = table(batch["input_ids"]) + perturbation
        logits = model(inputs_embeds=embedded, **inputs).logits
        return torch.nn.functional.cross_entropy(logits, batch["targets"], reduction="sum")

    start = torch.zeros(*batch["input_ids"].shape, table.embedding_dim, dtype=torch.float64)
    total = attacked_loss(start, how, loss)
    return total, torch.autograd.grad(total, list(model.parameters()))


CLASSIFIER = SimpleNamespace(compute_loss=lambda model, batch: LossSum(class_loss(model, batch)))


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize(
    ("kind", "fields"),
    [("fgm", {}), ("pgd", {"steps": 4, "alpha": 0.4}), ("freelb", {"steps": 3, "alpha": 0.7})],
)
def test_gradients_equal_those_of_the_papers(kind, fields, norm):
    model, batch = model_and_batch()
    how = attack(kind, epsilon=0.9 if norm == "l2" else 0.05, norm=norm, **fields)
    # The classifier's logits are rounded to 32 bits; so is the perturbation.
    expected, gradients = plain_gradients(model, batch, how)
    found = trained(model, CLASSIFIER, batch, how)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    for parameter, theirs in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", ["fgm", "pgd", "freelb"])
def test_texts_of_two_micro_batches_add_up_to_those_of_one(kind):
    model, batch = model_and_batch()
    whole = trained(model, CLASSIFIER, batch, attack(kind))
    together = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    parts = sum(
        trained(model, CLASSIFIER, {name: item[rows] for name, item in batch.items()}, attack(kind))
        for rows in (slice(0, 1), slice(1, 3))
    )
    torch.testing.assert_close(parts, whole)
    for parameter, expected in zip(model.parameters(), together, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_an_attack_costs_more_than_random_noise_of_its_size(norm):
    model, batch = model_and_batch()
    how = AttackConfig(kind="pgd", epsilon=0.5 if norm == "l2" else 0.02, norm=norm)
    worst = search(model, batch, how, lambda: class_loss(model, batch))
    sizes = worst.detach().flatten(1).norm(dim=1, p=2 if norm == "l2" else torch.inf)
    assert (sizes <= how.epsilon * (1 + 1e-6)).all()
    losses = []
    for seed in range(20):
        torch.manual_seed(seed)
        noise = stepped(torch.zeros_like(worst), torch.randn(worst.shape), how)
        with torch.no_grad(), perturbed(model, noise):
            losses.append(class_loss(model, batch).item())
    with torch.no_grad(), perturbed(model, worst):
        assert class_loss(model, batch).item() > max(losses)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_padding_is_not_perturbed():
    model, batch = model_and_batch()
    found = search(model, batch, attack(), lambda: class_loss(model, batch))
    assert not found[batch["attention_mask"] == 0].any()
    assert found[batch["attention_mask"] == 1].any()


@pytest.mark.parametrize(
    ("norm", "value"),
    [("l2", 0.0), ("l2", torch.inf), ("l2", torch.nan), ("linf", 0.0), ("linf", torch.nan)],
)
def test_a_text_without_a_direction_keeps_its_perturbation(norm, value):
    start, gradient = torch.full((2, 3, 4), 0.01), torch.randn(2, 3, 4)
    gradient[0] = value
    found = ascended(start, gradient, attack(norm=norm))
    assert found[0].equal(start[0])
    assert not found[1].equal(start[1])


def test_a_tiny_gradient_has_a_direction():
    gradient = 1e-25 * torch.randn(2, 3, 4)
    found = ascended(torch.zeros(2, 3, 4), gradient, attack("fgm", epsilon=2.0))
    torch.testing.assert_close(found.detach().flatten(1).norm(dim=1), torch.full((2,), 2.0))


def test_all_passes_of_a_micro_batch_have_the_same_dropout():
    """Without a way to move, each pass has the loss of the first."""
    model, batch = model_and_batch(dropout=0.5)
    model.train()
    how = attack("freelb", epsilon=1e-12, alpha=1e-12)
    torch.manual_seed(5)
    losses = [class_loss(model, batch).item()]
    after = torch.get_rng_state()
    torch.manual_seed(5)
    for _ in passes_of(model, CLASSIFIER, batch, how):
        loss = class_loss(model, batch)
        loss.backward()
        losses.append(loss.item())
    assert losses == pytest.approx([losses[0]] * 4)
    # The next micro-batch draws other dropout.
    assert torch.get_rng_state().equal(after)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"epsilon": 0.5}, r"adversarial\.epsilon = 0\.5: with training\.adversarial\.kind none"),
        ({"kind": "fgm", "steps": 2}, r"adversarial\.steps = 2: with .*kind fgm"),
        ({"kind": "freelb", "steps": 1}, "use at least 2"),
        ({"kind": "pgd", "epsilon": 0}, r"adversarial\.epsilon = 0"),
    ],
)
def test_fields_that_nothing_reads_are_rejected(fields, problem):
    content = {"name": "tiny", "data": {"source": ["unused"]}, "model": {"config": BERT}}
    with pytest.raises(ConfigError, match=problem):
        from_mapping({**content, "training": {"adversarial": fields}})

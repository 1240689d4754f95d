"""Mixup equals the papers' formulas, written out in double precision with loops."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForSequenceClassification

from steadytrain.components.memory.random_model import LiveTensors
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.errors import ConfigError
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tasks.base import OpenTask
from steadytrain.components.tasks.checks import check_task
from steadytrain.components.tasks.criterion import Criterion, Mixed
from steadytrain.components.techniques.adversarial_training.attack import perturbed
from steadytrain.components.techniques.mixup.mixing import PARTNER, SHARE, mixing
from steadytrain.components.techniques.r_drop.passes import in_pairs

from support.training import GPT2, LLAMA
from support.weight_digests import BERT

WORDS, PAD, LABELS = 30, 1, ["a", "b", "c"]
STILL = {
    **BERT,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "vocab_size": WORDS,
    "pad_token_id": PAD,
}
STILL_GPT2 = {**GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
STILL_GPT2 |= {"vocab_size": WORDS, "pad_token_id": PAD}
MODELS = {
    "bert": STILL,
    "gpt2": STILL_GPT2,
    "llama": {**LLAMA, "vocab_size": WORDS, "pad_token_id": PAD},
}


def text(*ids, label=0):
    return {"input_ids": list(ids), "label": label}


PAIRS = [
    (text(5, 6, 7, label=0), text(8, 9, 10, 11, 12, label=2), 0.3),
    (text(13, 14, 15, 16, label=1), text(17, label=1), 0.85),
    (text(18, 19, label=2), text(20, 21, label=0), 0.5),
]
ROWS = [{**own, PARTNER: other, SHARE: share} for own, other, share in PAIRS]


def opened(architecture=STILL, **training):
    config = from_mapping(
        {
            "name": "tiny",
            "data": {"source": ["unused"], "task": "sequence_classification"},
            "model": {"config": architecture},
            "training": {"mixup": {"alpha": 0.4}, **training},
        }
    )
    task = OpenTask(config, DataRecord.model_construct(labels=LABELS)).training
    task.__dict__["tokenizer"] = type("Tokenizer", (), {"pad_token_id": PAD, "eos_token_id": 0})
    return task


def built(architecture=STILL):
    torch.manual_seed(0)
    fields = {**architecture, "num_labels": 3}
    config = AutoConfig.for_model(**fields, attn_implementation="eager")
    return AutoModelForSequenceClassification.from_config(config).double()


def plain_logits(model, own, other, share):
    """Return the logits (1, classes) of one mixture, whose embeddings are added word by word."""
    table = model.get_input_embeddings().weight
    length = max(len(own["input_ids"]), len(other["input_ids"]))
    rows = []
    for place in range(length):
        row = torch.zeros(table.shape[1], dtype=table.dtype)
        for item, weight in ((own, share), (other, 1 - share)):
            if place < len(item["input_ids"]):
                row = row + weight * table[item["input_ids"][place]]
        rows.append(row)
    return model(inputs_embeds=torch.stack(rows)[None]).logits


def plain_loss(model, pairs):
    total = 0
    for own, other, share in pairs:
        logs = plain_logits(model, own, other, share)[0].log_softmax(0)
        total = total - share * logs[own["label"]] - (1 - share) * logs[other["label"]]
    return total


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_equal_the_formula(name):
    model = built(MODELS[name])
    task = opened(MODELS[name])
    task.ready(model)
    # Shares of 32 bits in double precision.
    pairs = [(own, other, torch.tensor(share).double().item()) for own, other, share in PAIRS]
    weights = [item for item in model.parameters() if item.requires_grad]
    expected = plain_loss(model, pairs)
    slopes = torch.autograd.grad(expected, weights, allow_unused=True)
    found = task.compute_loss(model, task.collate(ROWS)).total
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    for one, other in zip(
        torch.autograd.grad(found, weights, allow_unused=True), slopes, strict=True
    ):
        if other is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


def test_gradients_are_finite_differences():
    model = built()
    task = opened()
    task.ready(model)
    batch, table = task.collate(ROWS), model.get_input_embeddings().weight
    task.compute_loss(model, batch).total.backward()
    slope = table.grad.clone()
    for token, column in ((5, 0), (8, 3), (17, 7), (20, 1)):
        values = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                table[token, column] += step
                values.append(loss_in_double(task, model, batch))
                table[token, column] -= step
        assert slope[token, column].item() == pytest.approx(
            (values[0] - values[1]) / 2e-5, rel=1e-3, abs=1e-7
        )
    # Padding has no part in any mixture.
    assert not slope[PAD].any()


def loss_in_double(task, model, batch):
    """Return the loss without the rounding to 32 bits that the training loss has."""
    with mixing(task.embedding, batch):
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    mixed = Mixed(batch["partner_targets"], batch["shares"])
    return Criterion()(logits, batch["targets"], mixed).item()


@pytest.mark.parametrize(
    "how",
    [
        Criterion(),
        Criterion(smoothing=0.1),
        Criterion(gamma=2.0),
        Criterion(weights=torch.tensor([0.5, 1.0, 2.0])),
        Criterion(r_drop=1.5),
        Criterion(r_drop=0.5, gamma=1.0, smoothing=0.1, weights=torch.tensor([0.5, 1.0, 2.0])),
    ],
)
def test_loss_is_that_of_both_targets_by_their_shares(how):
    torch.manual_seed(1)
    rows = 8
    logits = torch.randn(rows, 3, dtype=torch.float64, requires_grad=True)
    first, second = torch.randint(3, (2, rows))
    shares = torch.rand(rows, dtype=torch.float64)
    order = in_pairs if how.r_drop else lambda found: found
    if how.r_drop:
        # Both passes of a row have its targets.
        first, second, shares = (
            torch.cat([item[:4], item[:4]]) for item in (first, second, shares)
        )

    def loss(targets, row):
        logs = logits[row].log_softmax(0)
        losses = -logs
        weight = 1.0 if how.weights is None else how.weights[targets].double()
        spread = (1 - how.smoothing) * losses[targets] + how.smoothing * losses.mean()
        return weight * spread * (1 - logs[targets].exp()) ** how.gamma

    expected = sum(
        shares[row] * loss(first[row], row) + (1 - shares[row]) * loss(second[row], row)
        for row in range(rows)
    )
    if how.r_drop:
        one, other = (half.softmax(1) for half in logits.chunk(2))
        apart = (one * (one / other).log()).sum() + (other * (other / one).log()).sum()
        expected = (expected + how.r_drop * apart / 2) / 2
    found = how(order(logits), order(first), Mixed(order(second), order(shares)))
    assert found.item() == pytest.approx(expected.item(), rel=1e-9)
    slopes = [torch.autograd.grad(loss, logits)[0] for loss in (found, expected)]
    torch.testing.assert_close(slopes[0], slopes[1], rtol=1e-8, atol=1e-12)


def test_r_drop_passes_each_mixture_twice():
    model = built()
    task = opened(r_drop={"weight": 1.0}, focal_loss={"gamma": 2.0})
    # `ready` would reject a model without dropout.
    task.embedding = model.get_input_embeddings()
    alone = opened(focal_loss={"gamma": 2.0})
    alone.ready(model)
    # Without dropout, both passes are equal and their divergence is 0.
    found = task.compute_loss(model, task.collate(ROWS)).total
    expected = alone.compute_loss(model, alone.collate(ROWS)).total
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)


def test_mixtures_do_not_depend_on_the_micro_batch():
    model = built()
    task = opened()
    task.ready(model)
    whole = task.compute_loss(model, task.collate(ROWS)).total
    parts = sum(task.compute_loss(model, task.collate([row])).total for row in ROWS)
    torch.testing.assert_close(whole, parts, rtol=1e-6, atol=0)


def test_row_alone_has_the_plain_loss():
    model = built()
    task = opened()
    task.ready(model)
    batch = task.collate([{**own, PARTNER: own, SHARE: 0.3} for own, _, _ in PAIRS])
    plain = task.collate([own for own, _, _ in PAIRS])
    assert "partner_ids" not in plain
    found, expected = (task.compute_loss(model, item).total.item() for item in (batch, plain))
    assert found == pytest.approx(expected, rel=1e-6)
    assert task.validate(model, plain)["loss"] == pytest.approx(expected, rel=1e-6)


def test_perturbation_is_added_to_the_mixture():
    model = built()
    task = opened(adversarial={"kind": "fgm"})
    task.ready(model)
    batch = task.collate(ROWS)
    seen = []
    table = model.get_input_embeddings()
    with mixing(table, batch):
        mixture = table(batch["input_ids"]).detach()
    perturbation = torch.randn_like(mixture)

    with perturbed(model, perturbation), mixing(table, batch):
        hook = table.register_forward_hook(lambda _, __, found: seen.append(found.detach()))
        table(batch["input_ids"])
        hook.remove()
    torch.testing.assert_close(seen[0], mixture + perturbation)


def test_mixing_leaves_the_model_as_it_was():
    model = built()
    table = model.get_input_embeddings()
    task = opened()
    batch, plain = task.collate(ROWS), table(torch.tensor([[5, 6]]))
    with pytest.raises(RuntimeError, match="stop"), mixing(table, batch):
        raise RuntimeError("stop")
    assert torch.equal(table(torch.tensor([[5, 6]])), plain)


def test_mixtures_need_no_more_memory_than_texts_of_their_length():
    rows = [
        (text(*range(2, 2 + 24), label=number % 3), text(*range(4, 4 + 24), label=number % 2))
        for number in range(8)
    ]
    model = built({**STILL, "num_hidden_layers": 4})
    task = opened()
    task.ready(model)

    def peak(batch):
        model.zero_grad(set_to_none=True)
        with LiveTensors() as live:
            for tensor in (*model.parameters(), *model.buffers()):
                live.see(tensor, "held")
            held = live.bytes
            task.compute_loss(model, batch).total.backward()
        return live.peak - held

    plain = peak(task.collate([own for own, _ in rows]))
    mixed = peak(task.collate([{**own, PARTNER: other, SHARE: 0.4} for own, other in rows]))
    assert mixed < 1.05 * plain


def test_labels_that_cross_entropy_can_mix_equal_soft_labels():
    logits, first, second = (
        torch.randn(4, 3),
        torch.tensor([0, 1, 2, 0]),
        torch.tensor([1, 1, 0, 2]),
    )
    shares = torch.tensor([0.1, 0.5, 0.9, 0.4])
    soft = shares[:, None] * functional.one_hot(first, 3)
    soft = soft + (1 - shares)[:, None] * functional.one_hot(second, 3)
    expected = functional.cross_entropy(logits, soft, reduction="sum")
    torch.testing.assert_close(Criterion()(logits, first, Mixed(second, shares)), expected)


@pytest.mark.parametrize(
    ("training", "problem"),
    [
        ({"mixup": {"alpha": -1}}, r"training\.mixup\.alpha = -1"),
        ({"global_batch_size": 1}, r"training\.mixup\.alpha = 0\.4.*global_batch_size is 1"),
        ({"distillation": {"teacher": "x"}}, r"training\.mixup .*training\.distillation is on"),
        ({"batch_contrastive": {"rows": 4}}, r"batch_contrastive .*training\.mixup is on"),
        ({"monitor": {"noise_scale": True}}, r"noise_scale .*training\.mixup is on"),
    ],
)
def test_what_cannot_work_is_rejected(training, problem):
    with pytest.raises(ConfigError, match=problem):
        opened(**training)


@pytest.mark.parametrize("task", ["causal_lm", "multi_task", "text_embedding"])
def test_other_tasks_reject_it(task):
    parts = {"a": {"source": ["a"]}, "b": {"source": ["b"]}}
    several = {"data": {"parts": parts, "task": task}, "gate": {"max_slice_regression": 0.02}}
    config = from_mapping(
        {
            "name": "tiny",
            "data": {"source": ["unused"], "task": task},
            "model": {"config": GPT2},
            "training": {"mixup": {"alpha": 0.4}},
            **(several if task == "multi_task" else {}),
        }
    )
    with pytest.raises(ConfigError, match=rf"training\.mixup.*{task} does not include it"):
        check_task(config)

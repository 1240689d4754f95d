"""Direct preference optimization: TRL's loss, its gradients, and the model it refers to."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM

from steadytrain.components.shared.config import AdapterConfig, from_mapping
from steadytrain.components.shared.errors import BadInput, ConfigError
from steadytrain.components.tasks import fused_head
from steadytrain.components.tasks.causal_lm import token_logits
from steadytrain.components.tasks.checks import check_task
from steadytrain.components.tasks.frozen_parts import attach
from steadytrain.components.tasks.fused_head import fuse_head, likelihood_loss, likelihoods
from steadytrain.components.tasks.preference import (
    PreferenceTraining,
    document_likelihoods,
    without_adapters,
)
from steadytrain.components.techniques.base import IGNORED
from steadytrain.components.techniques.modules import eval_mode
from steadytrain.components.techniques.preferences.loss import dpo_loss

from support.tiny import make_tokenizer
from support.training import LLAMA, VOCABULARY, packed_row, write_data

CAPPED = {**LLAMA, "model_type": "gemma2", "final_logit_softcapping": 30.0, "head_dim": 8}
BETA, SMOOTHING = 0.3, 0.2


def model_of(fields=LLAMA, seed=0):
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**{**fields, "vocab_size": VOCABULARY})
    return AutoModelForCausalLM.from_config(config)


def pair(lengths, generator, answers):
    """Return a row of two documents whose last tokens, as many as each answer has, are targets."""
    row = packed_row(lengths, generator)
    targets = [
        [0] * (length - answer) + [1] * answer
        for length, answer in zip(lengths, answers, strict=True)
    ]
    return {**row, "targets": [each for document in targets for each in document]}


@pytest.fixture
def rows():
    generator = np.random.default_rng(0)
    return [
        pair([9, 6], generator, [4, 1]),
        pair([4, 11], generator, [3, 10]),
        pair([5, 5], generator, [2, 2]),
    ]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    model_of().save_pretrained(folder)
    return folder


def task_of(folder, base, **training):
    data = write_data(folder / "data", [], [], task="preference")
    content = {
        "name": "tiny",
        "data": {"source": ["unused"], "task": "preference"},
        "model": {"base": str(base)},
        "training": {"dpo": {"beta": BETA}, "label_smoothing_factor": SMOOTHING, **training},
    }
    return PreferenceTraining(from_mapping(content), data)


def opened(task, change=0.05):
    """Return the model to train, ready and moved away from its reference."""
    model = task.build_model().train()
    task.ready(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += change * torch.randn_like(parameter)
    return model


def trl_inputs(task, rows):
    """Return what TRL's collator makes of the same pairs: all first answers, then all others."""
    documents = []
    for row in rows:
        first = row["lengths"][0]
        documents.append([(row["input_ids"][:first], row["targets"][:first])])
        documents[-1].append((row["input_ids"][first:], row["targets"][first:]))
    ordered = [each[0] for each in documents] + [each[1] for each in documents]
    width = max(len(ids) for ids, _ in ordered)
    shape = (len(ordered), width)
    found = {
        "input_ids": torch.full(shape, task.pad_token_id),
        "attention_mask": torch.zeros(shape, dtype=torch.int64),
        "completion_mask": torch.zeros(shape, dtype=torch.int64),
    }
    for index, (ids, targets) in enumerate(ordered):
        found["input_ids"][index, : len(ids)] = torch.tensor(ids)
        found["attention_mask"][index, : len(ids)] = 1
        found["completion_mask"][index, : len(ids)] = torch.tensor(targets)
    return found


@pytest.mark.slow
def test_loss_gradients_and_metrics_are_those_of_trl(tmp_path, base, rows):
    from trl import DPOConfig, DPOTrainer

    task = task_of(tmp_path, base, label_smoothing_factor=0.0)
    model = opened(task)
    theirs = model_of().requires_grad_()
    theirs.load_state_dict(model.state_dict())
    tokenizer = make_tokenizer(0)
    tokenizer.pad_token = tokenizer.eos_token
    trainer = DPOTrainer(
        model=theirs,
        ref_model=model_of(),
        args=DPOConfig(
            str(tmp_path / "trl"),
            use_cpu=True,
            bf16=False,
            report_to="none",
            beta=BETA,
            activation_checkpointing=False,
        ),
        train_dataset=Dataset.from_list([{"prompt": "a ", "chosen": "b", "rejected": "c"}]),
        processing_class=tokenizer,
    )
    expected = trainer._compute_loss(trainer.model.train(), trl_inputs(task, rows), False)
    expected.backward()
    batch = task.collate(rows)
    assert "lengths" in batch, "attention by document is what is tested"
    found = task.compute_loss(model, batch).total / task.weight(batch)
    found.backward()
    assert found.item() == pytest.approx(expected.item(), abs=1e-5)
    assert found.item() != pytest.approx(np.log(2), abs=1e-3)
    own = dict(theirs.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, own[name].grad, rtol=1e-4, atol=1e-6)
    sums = task.validate(model.eval(), batch)
    metrics = task.validation_metrics(sums)
    logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    assert metrics["preference_accuracy"] == pytest.approx(logged["rewards/accuracies"])
    assert metrics["preference_margin"] == pytest.approx(logged["rewards/margins"], abs=1e-5)


def test_the_untrained_model_is_its_own_reference(tmp_path, base, rows):
    task = task_of(tmp_path, base)
    model = opened(task, change=0.0)
    found = task.validation_metrics(task.validate(model.eval(), task.collate(rows)))
    assert found == {
        "loss": pytest.approx(np.log(2), abs=1e-6),
        "preference_accuracy": pytest.approx(0, abs=1),
        "preference_margin": pytest.approx(0, abs=1e-6),
    }


def test_pairs_have_the_same_loss_in_smaller_micro_batches(tmp_path, base, rows):
    task = task_of(tmp_path, base)
    model = opened(task)
    whole = task.compute_loss(model, task.collate(rows)).total
    parts = sum(task.compute_loss(model, task.collate([row])).total for row in rows)
    assert parts.item() == pytest.approx(whole.item(), rel=1e-5)


def test_without_adapters_a_model_is_its_base(base, rows, tmp_path):
    """So adapters need no second model, and dropout does not reach the reference."""
    task = task_of(tmp_path, base)
    adapted = attach(model_of(), AdapterConfig(kind="lora", rank=4, dropout=0.5)).train()
    model = task.config.model.model_copy(update={"adapter": AdapterConfig(kind="lora")})
    task.config = task.config.model_copy(update={"model": model})
    task.ready(adapted)
    assert task.reference is None
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter += 1.0
    batch = task.collate(rows)
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    with without_adapters(adapted), eval_mode(adapted):
        found = document_likelihoods(adapted, batch)
    with torch.no_grad():
        plain = document_likelihoods(model_of().eval(), batch)
    torch.testing.assert_close(found, plain, rtol=1e-6, atol=1e-6)
    assert {name for name, p in adapted.named_parameters() if p.requires_grad} == trained
    with eval_mode(adapted):
        assert not torch.allclose(document_likelihoods(adapted, batch), plain)


@pytest.mark.parametrize("fields", [LLAMA, CAPPED], ids=["fused", "capped"])
def test_likelihoods_are_those_of_the_complete_logits(rows, tmp_path, base, fields):
    model = model_of(fields).eval()
    assert bool(fuse_head(model)) == (fields is CAPPED)
    batch = task_of(tmp_path, base).collate(rows)
    with torch.no_grad():
        found = document_likelihoods(model, batch)
        logits = token_logits(model, batch).double().log_softmax(-1).flatten(0, 1)
    targets = batch["targets"].flatten()
    kept = targets != IGNORED
    each = logits[kept].gather(1, targets[kept].unsqueeze(1)).squeeze(1)
    expected = torch.stack([part.sum() for part in each.split(batch["counts"])])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def some_head():
    torch.manual_seed(0)
    counts = [4, 1, 5, 3]
    hidden, weight, bias = torch.randn(17, 8), torch.randn(23, 8), torch.randn(23)
    targets = torch.full((17,), IGNORED)
    targets[torch.tensor([0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 12, 14, 16])] = torch.randint(23, (13,))
    return [hidden, weight, bias], targets, counts


def compared(sums):
    margins = sums[0::2] - sums[1::2]
    return dpo_loss(0.3 * margins, 0.1).sum()


def test_gradients_are_the_finite_differences_of_a_plain_computation(monkeypatch):
    monkeypatch.setattr(fused_head, "chunk_rows", lambda vocabulary: 5)
    monkeypatch.setattr(fused_head, "comparison_rows", lambda vocabulary: 2)
    given, targets, counts = some_head()
    exact = [each.double() for each in given]

    def plain(hidden, weight, bias):
        kept = targets != IGNORED
        chances = (hidden[kept] @ weight.T + bias).log_softmax(1)
        each = chances.gather(1, targets[kept].unsqueeze(1)).squeeze(1)
        return compared(torch.stack([part.sum() for part in each.split(counts)]))

    ours = [each.clone().requires_grad_() for each in given]
    loss = likelihood_loss(*ours, targets, counts, compared)
    (3 * loss).backward()
    assert loss.item() == pytest.approx(plain(*exact).item(), rel=1e-5)
    torch.manual_seed(2)
    for index, tensor in enumerate(ours):
        step = torch.randn_like(exact[index])
        moved = [
            plain(*(each + sign * 1e-5 * step if place == index else each
                    for place, each in enumerate(exact)))
            for sign in (1, -1)
        ]  # fmt: skip
        expected = (moved[0] - moved[1]) / 2e-5
        found = (tensor.grad.double() * step).sum() / 3
        assert found.item() == pytest.approx(expected.item(), rel=1e-4)


def test_smoothing_spreads_the_target_over_both_answers():
    """As conservative DPO does, whose share of wrong labels is half of the smoothed share."""
    margins = torch.tensor([-3.0, 0.0, 2.0], dtype=torch.float64)
    right, wrong = margins.sigmoid().log(), (-margins).sigmoid().log()
    torch.testing.assert_close(dpo_loss(margins, 0.2), -0.9 * right - 0.1 * wrong)


def test_likelihoods_are_not_differentiable():
    given, targets, counts = some_head()
    assert not likelihoods(
        *(each.requires_grad_() for each in given), targets, counts
    ).requires_grad


def test_a_preference_needs_a_model_to_start_from():
    content = {
        "name": "tiny",
        "data": {"source": ["unused"], "task": "preference"},
        "model": {"config": LLAMA},
    }
    with pytest.raises(ConfigError, match=r"model\.base.*compares the model with the one"):
        check_task(from_mapping(content))


def test_only_preferences_read_beta():
    content = {
        "name": "tiny",
        "data": {"source": ["unused"]},
        "model": {"config": LLAMA},
        "training": {"dpo": {"beta": 0.5}},
    }
    with pytest.raises(ConfigError, match=r"training\.dpo.*does not include it"):
        check_task(from_mapping(content))
    with pytest.raises(ConfigError, match=r"training\.dpo\.beta"):
        from_mapping({**content, "training": {"dpo": {"beta": 0}}})


def test_a_reference_with_missing_files_is_an_error(tmp_path, base):
    task = task_of(tmp_path, tmp_path / "absent")
    with pytest.raises(BadInput, match="absent"):
        task.build_model()

"""Feedback without pairs: TRL's loss and gradients, whatever the micro-batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM

from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.errors import ConfigError
from steadytrain.components.tasks.base import MEASURED
from steadytrain.components.tasks.checks import check_task
from steadytrain.components.tasks.preference import (
    UnpairedPreferenceTraining,
    _own,
    document_likelihoods,
)
from steadytrain.components.techniques.mixup.mixing import PARTNER

from support.tiny import make_tokenizer
from support.training import LLAMA, VOCABULARY, packed_row, write_data

KTO = {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.7}
# Prompt, answer, and whether it is good.
SHAPES = [(5, 4, True), (3, 9, False), (7, 2, True), (2, 3, False), (4, 6, False)]
LIMIT = 14


def model_of():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**{**LLAMA, "vocab_size": VOCABULARY})
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    model_of().save_pretrained(folder)
    return folder


@pytest.fixture
def rows():
    generator = np.random.default_rng(0)
    rows = [
        {
            **packed_row([prompt + answer], generator),
            "targets": [0] * prompt + [1] * answer,
            "desirable": good,
        }
        for prompt, answer, good in SHAPES
    ]
    return [{**row, PARTNER: rows[index - 1]} for index, row in enumerate(rows)]


def content(base, **training):
    return {
        "name": "tiny",
        "data": {"source": ["unused"], "task": "unpaired_preference"},
        "model": {"base": str(base)},
        "training": {"kto": KTO, **training},
    }


@pytest.fixture
def task(tmp_path, base):
    data = write_data(tmp_path / "data", [], [], task="unpaired_preference", sequence_length=LIMIT)
    return UnpairedPreferenceTraining(from_mapping(content(base)), data)


def opened(task, rows, *, learned):
    """Return the model to train, ready and moved away from its reference.

    Args:
        learned: whether all answers have become more likely, and not less.
    """
    model = task.build_model().train()
    task.ready(model)
    batch = _own(task.collate(rows))
    sign = -1 if learned else 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for _ in range(8):
        document_likelihoods(model, batch, lambda found: sign * found.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def step(task, model, rows, micro):
    """Return the mean loss of a global batch and its reference point, as the loop computes them."""
    batches = [task.collate(rows[start : start + micro]) for start in range(0, len(rows), micro)]
    weight = sum(map(task.weight, batches))
    measured = sum(task.measure(model, batch) for batch in batches) / weight
    total = 0.0
    for batch in batches:
        loss = task.compute_loss(model, {**batch, MEASURED: measured}).total / weight
        loss.backward()
        total += loss.item()
    return total, measured.item()


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    from trl import KTOConfig, KTOTrainer

    tokenizer = make_tokenizer(0)
    tokenizer.pad_token = tokenizer.eos_token
    letters = [{"prompt": f"{x} ", "completion": x * 2, "label": x < "c"} for x in "abcde"]
    return KTOTrainer(
        model=model_of().requires_grad_(),
        ref_model=model_of(),
        args=KTOConfig(
            str(tmp_path_factory.mktemp("trl")),
            use_cpu=True,
            bf16=False,
            report_to="none",
            per_device_train_batch_size=len(SHAPES),
            activation_checkpointing=False,
            **KTO,
        ),
        train_dataset=Dataset.from_list(letters),
        processing_class=tokenizer,
    )


@pytest.mark.parametrize(("micro", "learned"), [(5, True), (2, True), (1, True), (5, False)])
def test_loss_and_gradients_are_those_of_trl(task, trainer, rows, micro, learned):
    from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

    model = opened(task, rows, learned=learned)
    trainer.model.load_state_dict(model.state_dict())
    trainer.model.zero_grad()
    answers = [row["input_ids"][prompt:] for row, (prompt, _, _) in zip(rows, SHAPES, strict=True)]
    examples = [
        {
            "prompt_ids": row["input_ids"][:prompt],
            "completion_ids": answers[index],
            "KL_completion_ids": answers[index - 1],
            "label": good,
        }
        for index, (row, (prompt, _, good)) in enumerate(zip(rows, SHAPES, strict=True))
    ]
    collator = DataCollatorForUnpairedPreference(pad_token_id=task.pad_token_id, max_length=LIMIT)
    expected = trainer._compute_loss(trainer.model.train(), collator(examples), False)
    expected.backward()
    found, measured = step(task, model, rows, micro)
    assert found == pytest.approx(expected.item(), abs=1e-5)
    assert max(measured, 0) == pytest.approx(trainer._metrics["train"]["kl"][-1], abs=1e-5)
    assert measured > 0.5 if learned else measured < -0.1, "both sides of the limit are tested"
    own = dict(trainer.model.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, own[name].grad, rtol=1e-4, atol=1e-6)


def test_mismatched_answers_are_those_of_trl(trainer):
    """TRL pairs each prompt with the answer before it, and the first with the last."""
    answers = trainer.train_dataset["completion_ids"]
    expected = [answers[index - 1] for index in range(len(SHAPES))]
    assert trainer.train_dataset["KL_completion_ids"] == expected
    assert len(set(map(tuple, answers))) == len(SHAPES)


def test_validation_counts_each_record_alone(task, rows):
    """Its reference point is 0, so the loss is what TRL calls apo_zero_unpaired."""
    model = opened(task, rows, learned=True).eval()
    plain = [{name: row[name] for name in row if name != PARTNER} for row in rows]
    found = task.validation_metrics(task.validate(model, task.collate(plain)))
    batch = _own(task.collate(plain))
    with torch.no_grad():
        gained = document_likelihoods(model, batch) - document_likelihoods(model_of(), batch)
    signs = np.array([1 if good else -1 for _, _, good in SHAPES])
    weights = np.array([1.5 if good else 0.7 for _, _, good in SHAPES])
    margins = KTO["beta"] * signs * gained.numpy()
    assert found == {
        "loss": pytest.approx((weights / (1 + np.exp(margins))).mean(), abs=1e-5),
        "preference_accuracy": pytest.approx((margins > 0).mean()),
        "preference_margin": pytest.approx(margins.mean(), abs=1e-5),
    }
    parts = [task.validate(model, task.collate([row])) for row in plain]
    assert sum(part["loss"] for part in parts) / len(parts) == pytest.approx(found["loss"])


@pytest.mark.parametrize(
    ("training", "problem"),
    [
        ({"global_batch_size": 1}, r"training\.global_batch_size = 1.*the batch's other prompts"),
        ({"label_smoothing_factor": 0.1}, r"label_smoothing_factor = 0\.1.*no target to spread"),
        ({"kto": {}, "dpo": {"beta": 0.5}}, r"training\.dpo.*does not include it"),
        (
            {"kto": {"desirable_weight": 0, "undesirable_weight": 0}},
            r"kto\.undesirable_weight.*nothing is learned",
        ),
    ],
)
def test_what_has_no_effect_is_refused(base, training, problem):
    check_task(from_mapping(content(base)))
    with pytest.raises(ConfigError, match=problem):
        check_task(from_mapping(content(base, **training)))

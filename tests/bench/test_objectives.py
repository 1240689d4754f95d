"""What objectives cost: CPU time and live memory of a forward and backward pass, by the plan too.

The peer is the same pass with the plain loss. Run with
`pytest -m bench tests/bench/test_objectives.py -s`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from steadytrain.components.memory.peak import peak_memory
from steadytrain.components.memory.random_model import random_model
from steadytrain.components.memory.setting import Setting
from steadytrain.components.memory.shape import shape_of
from steadytrain.components.memory.techniques import frozen_model_of, run_frozen_model
from steadytrain.components.shared.chunks import answer_bytes
from steadytrain.components.shared.config import (
    RunConfig,
    from_mapping,
)
from steadytrain.components.tasks.base import Batch
from steadytrain.components.tasks.causal_lm import next_token_loss, token_answers
from steadytrain.components.tasks.fused_head import Contrast, fuse_head
from steadytrain.components.tasks.preference import document_likelihoods
from steadytrain.components.techniques.contrastive_tokens import ContrastiveConfig
from steadytrain.components.techniques.contrastive_tokens.loss import document_spans
from steadytrain.components.techniques.distillation import DistillationConfig
from steadytrain.components.techniques.distillation.loss import (
    Teaching,
    attach_comparison,
    comparing_part,
    top_answers,
)
from steadytrain.components.techniques.distillation.teacher import Teacher
from steadytrain.components.techniques.preferences.loss import dpo_loss, reward_margins

from support.costs import in_turns, peak_beside

pytestmark = pytest.mark.bench
LENGTH, ROWS, PASSES, TOP_K = 256, 4, 7, 64
STUDENT = {
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "max_position_embeddings": LENGTH,
}
TEACHER = {**STUDENT, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8}
PLAIN = Setting(length=LENGTH, micro_batch=ROWS, cuda=False)
Loss = Callable[[torch.nn.Module, Batch], torch.Tensor]


def test_cost_of_objectives(tmp_path):
    torch.set_num_threads(1)
    batch = {
        "input_ids": torch.randint(8192, (1, ROWS * LENGTH)),
        "position_ids": torch.arange(LENGTH).repeat(ROWS)[None],
        "targets": torch.randint(8192, (1, ROWS * LENGTH)),
        "lengths": [LENGTH] * ROWS,
    }
    model = random_model(STUDENT, PLAIN)
    frozen = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TEACHER)).eval()
    assert not fuse_head(frozen.requires_grad_(False))
    frozen.save_pretrained(tmp_path)
    teacher = Teacher(frozen, DistillationConfig(teacher="above"))
    stored = stored_answers(teacher, batch)
    matched = matching(tmp_path)
    student = random_model(STUDENT, PLAIN)
    attach_comparison(student, matched)
    matching_teacher = Teacher(frozen, matched.training.distillation, comparing_part(student))
    contrast = Contrast(document_spans(batch), ContrastiveConfig(weight=1.0))
    frozen_model = frozen_model_of(shape_of(TEACHER), half=False, length=LENGTH)
    reference = AutoModelForCausalLM.from_config(AutoConfig.for_model(**STUDENT)).eval()
    assert not fuse_head(reference.requires_grad_(False))
    pairs = {**batch, "counts": [LENGTH] * ROWS}
    preference = from_mapping(
        {
            "name": "any",
            "data": {"source": ["unused"], "task": "preference"},
            "model": {"base": "unused"},
        }
    )

    def compared(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            before = document_likelihoods(reference, pairs)
        return document_likelihoods(
            model, pairs, lambda found: dpo_loss(reward_margins(found, before, 0.1)).sum()
        )

    losses: dict[str, tuple[Loss, Setting]] = {
        "plain": (next_token_loss, PLAIN),
        "distillation": (
            lambda model, batch: next_token_loss(
                model, batch, teaching=teacher.teach(token_answers, batch)
            ),
            replace(PLAIN, frozen_model=frozen_model),
        ),
        "distillation, stored answers": (
            lambda model, batch: next_token_loss(model, batch, teaching=stored),
            replace(PLAIN, differentiates=True, answers=ROWS * LENGTH * answer_bytes(TOP_K)),
        ),
        "distillation, hidden states": (
            lambda _, batch: next_token_loss(
                student, batch, teaching=matching_teacher.teach(token_answers, batch)
            ),
            replace(
                PLAIN,
                frozen_model=run_frozen_model(
                    matched, shape_of(STUDENT), half=False, length=LENGTH
                ),
            ),
        ),
        "contrastive": (
            lambda model, batch: next_token_loss(model, batch, contrast=contrast),
            replace(PLAIN, contrasts=True),
        ),
        "preference": (
            compared,
            replace(
                PLAIN,
                frozen_model=run_frozen_model(
                    preference, shape_of(STUDENT), half=False, length=LENGTH
                ),
            ),
        ),
    }
    works = {
        name: lambda loss=loss: loss(model, batch).backward() for name, (loss, _) in losses.items()
    }
    timed = in_turns(works, PASSES)
    for name, (_, setting) in losses.items():
        trained = student if "hidden" in name else model
        trained.zero_grad(set_to_none=True)
        held = [
            tensor
            for module in (trained, frozen, reference)
            for tensor in (*module.parameters(), *module.buffers())
        ]
        print(
            f"\n{name}: {timed[name]} of CPU time; "
            f"{peak_beside(held, works[name]) / 1e6:.1f} MB at the peak, "
            f"{planned(setting) / 1e6:.1f} by the formula"
        )


def matching(teacher: Path) -> RunConfig:
    """Return a configuration that compares the hidden states of all layers with a teacher's."""
    hidden = {"weight": 1.0, "loss": "mse", "layers": "all"}
    return from_mapping(
        {
            "name": "any",
            "data": {"source": ["unused"], "sequence_length": LENGTH},
            "model": {"config": STUDENT},
            "training": {"distillation": {"teacher": str(teacher), "hidden": hidden}},
        }
    )


def stored_answers(teacher: Teacher, batch: Batch) -> Teaching:
    """Return what training gets if the teacher's answers are stored."""
    settings = DistillationConfig(teacher="above", top_k=TOP_K)
    given = teacher.teach(token_answers, batch).logits(torch.arange(ROWS * LENGTH))
    assert isinstance(given, torch.Tensor)
    found = top_answers(given, TOP_K, settings.temperature)
    return Teaching(lambda rows: found[rows], settings)


def planned(setting: Setting) -> int:
    """Return what the formula expects of the same: without the update and what outlives it."""
    memory = peak_memory(shape_of(STUDENT), setting)
    weights = setting.frozen_model.weights if setting.frozen_model else 0
    return memory.total - memory.weights - memory.optimizer - weights

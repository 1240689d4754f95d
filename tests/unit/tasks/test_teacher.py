"""A teacher: its logits, by its head or complete, and which models cannot teach."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from steadytrain.components.preprocess.model import find_model
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tasks.causal_lm import next_token_loss, token_answers, token_logits
from steadytrain.components.tasks.documents import collate_rows
from steadytrain.components.tasks.fused_head import fuse_head
from steadytrain.components.techniques.base import IGNORED
from steadytrain.components.techniques.distillation import DistillationConfig
from steadytrain.components.techniques.distillation.teacher import Teacher

from support.training import LLAMA, VOCABULARY, packed_row, write_tokenizer

CAPPED = {**LLAMA, "model_type": "gemma2", "final_logit_softcapping": 30.0, "head_dim": 8}
SETTINGS = DistillationConfig(teacher="above", temperature=3.0, weight=0.7)


def model_of(fields, seed):
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**{**fields, "vocab_size": VOCABULARY})
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture
def batch():
    generator = np.random.default_rng(0)
    return collate_rows([packed_row([5, 3], generator), packed_row([4], generator)], 1)


def taught(student, teacher, batch):
    teaching = Teacher(teacher, SETTINGS).teach(token_answers, batch)
    loss = next_token_loss(student, batch, 0.1, teaching)
    loss.backward()
    return loss.detach(), next(student.parameters()).grad


@pytest.mark.parametrize("fields", [LLAMA, CAPPED], ids=["plain", "capped"])
def test_fused_and_complete_logits_teach_the_same(batch, fields):
    """Heads that cannot be fused take the path with complete logits."""
    found = []
    for fuse in (False, True):
        student, teacher = model_of(LLAMA, 0), model_of(fields, 1)
        if fuse:
            assert fuse_head(student) == ""
            assert bool(fuse_head(teacher)) == (fields is CAPPED)
        found.append(taught(student, teacher, batch))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-6)


def test_only_rows_with_a_target_are_taught(batch):
    """A capped student, whose loss takes the complete logits, leaves padding and borders out."""
    student, teacher = model_of(CAPPED, 0), model_of(LLAMA, 1)
    loss, _ = taught(student, teacher, batch)
    heat, share = SETTINGS.temperature, SETTINGS.weight
    kept = batch["targets"] != IGNORED
    with torch.no_grad():
        own = token_logits(student, batch)[kept].double()
        other = (token_logits(teacher, batch)[kept].double() / heat).log_softmax(1)
    divergence = (other.exp() * (other - (own / heat).log_softmax(1))).sum()
    hard = torch.nn.functional.cross_entropy(
        own, batch["targets"][kept], reduction="sum", label_smoothing=0.1
    )
    expected = share * heat**2 * divergence + (1 - share) * hard
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)


def test_teaching_leaves_no_gradient_and_no_dropout_in_the_teacher(batch):
    teacher = model_of({**LLAMA, "attention_dropout": 0.5}, 1).requires_grad_(False)
    first, second = (
        Teacher(teacher, SETTINGS).teach(token_answers, batch).logits(torch.arange(4))
        for _ in range(2)
    )
    assert first.equal(second)
    assert not first.requires_grad


def prepared_for(teacher, tokenizer, top_k=None):
    return from_mapping(
        {
            "name": "tiny",
            "data": {"source": ["unused"], "sequence_length": 32},
            "model": {"config": {**LLAMA, "vocab_size": VOCABULARY}, "tokenizer": str(tokenizer)},
            "training": {"distillation": {"teacher": str(teacher), "top_k": top_k}},
        }
    )


def test_preprocessing_checks_the_teacher(tmp_path):
    """So no GPU is requested for a teacher that cannot be used."""
    write_tokenizer(tmp_path / "tokens")
    model_of(LLAMA, 1).save_pretrained(tmp_path / "teacher")
    write_tokenizer(tmp_path / "teacher")
    find_model(prepared_for(tmp_path / "teacher", tmp_path / "tokens"))
    find_model(prepared_for(tmp_path / "teacher", tmp_path / "tokens", VOCABULARY))
    with pytest.raises(BadInput, match=r"top_k = 65: the teacher has 64 tokens"):
        find_model(prepared_for(tmp_path / "teacher", tmp_path / "tokens", VOCABULARY + 1))
    with pytest.raises(BadInput, match="no folder"):
        find_model(prepared_for(tmp_path / "absent", tmp_path / "tokens"))
    with pytest.raises(BadInput, match=r"training\.distillation\.teacher: .* has no config\.json"):
        find_model(prepared_for(tmp_path / "tokens", tmp_path / "tokens"))
    short = model_of({**LLAMA, "max_position_embeddings": 16}, 1)
    short.save_pretrained(tmp_path / "short")
    with pytest.raises(BadInput, match=r"32: training\.distillation\.teacher takes at most 16"):
        find_model(prepared_for(tmp_path / "short", tmp_path / "tokens"))
    write_tokenizer(tmp_path / "teacher", VOCABULARY + 5)
    with pytest.raises(BadInput, match="its tokens are not those of the model that trains"):
        find_model(prepared_for(tmp_path / "teacher", tmp_path / "tokens"))


def test_preprocessing_checks_a_curriculums_model(tmp_path):
    write_tokenizer(tmp_path / "tokens")
    model_of(LLAMA, 1).save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")

    def config(name):
        found = prepared_for(tmp_path / "model", tmp_path / "tokens").model_dump(mode="json")
        curriculum = {"by": "loss", "model": str(tmp_path / name)}
        return from_mapping({**found, "training": {"curriculum": curriculum}})

    find_model(config("model"))
    with pytest.raises(BadInput, match="no folder"):
        find_model(config("absent"))
    with pytest.raises(BadInput, match=r"training\.curriculum\.model: .* has no config\.json"):
        find_model(config("tokens"))
    write_tokenizer(tmp_path / "model", VOCABULARY + 5)
    with pytest.raises(
        BadInput, match=r"training\.curriculum\.model = .* its tokens are not those"
    ):
        find_model(config("model"))

"""The loss of hidden states against a teacher's, compared with a plain computation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tasks.causal_lm import next_token_loss, token_answers, token_output
from steadytrain.components.tasks.documents import collate_rows
from steadytrain.components.tasks.fused_head import fuse_head
from steadytrain.components.techniques.base import IGNORED
from steadytrain.components.techniques.distillation import HiddenConfig
from steadytrain.components.techniques.distillation.loss import (
    HiddenStates,
    attach_comparison,
)
from steadytrain.components.techniques.distillation.teacher import Teacher

from support.training import LLAMA, VOCABULARY, packed_row

DEEP = {**LLAMA, "num_hidden_layers": 4, "hidden_size": 48}


def model_of(fields, seed):
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**{**fields, "vocab_size": VOCABULARY})
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture
def batch():
    generator = np.random.default_rng(0)
    return collate_rows([packed_row([5, 3], generator), packed_row([4], generator)], 1)


def configure(folder, **hidden):
    distillation = {"teacher": str(folder), "hidden": hidden}
    return from_mapping(
        {
            "name": "hidden",
            "data": {"source": ["unused"]},
            "model": {"config": LLAMA},
            "training": {"distillation": distillation},
        }
    )


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize(
    ("teacher", "kind"), [(DEEP, "mse"), ({**DEEP, "hidden_size": 32}, "cosine")]
)
def test_loss_is_the_papers(tmp_path, batch, teacher, kind, fuse):
    """Of DistilBERT and of TinyBERT, over the tokens with a target of all compared layers."""
    student, other = model_of(LLAMA, 0), model_of(teacher, 1).requires_grad_(False)
    other.save_pretrained(tmp_path)
    config = configure(tmp_path, weight=0.5, loss=kind, layers=[[0, 0], [1, 2], [2, 4]])
    attach_comparison(student, config)
    part = student.hidden_states
    assert (part.projection is None) == (teacher["hidden_size"] == 32)
    if fuse:
        assert fuse_head(student) == fuse_head(other) == ""
    settings = config.training.distillation
    without = Teacher(other, settings).teach(token_answers, batch)
    taught = Teacher(other, settings, part).teach(token_answers, batch)
    loss = next_token_loss(student, batch, teaching=taught)
    added = (loss - next_token_loss(student, batch, teaching=without)).double()
    with torch.no_grad():
        kept = batch["targets"] != IGNORED
        expected = 0.0
        own = token_output(student, batch, states=True).hidden_states
        states = token_output(other, batch, states=True).hidden_states
        for mine, its in ((0, 0), (1, 2), (2, 4)):
            first, second = own[mine][kept].double(), states[its][kept].double()
            if part.projection is not None:
                first = first @ part.projection.weight.double().T
            if kind == "mse":
                expected += ((first - second) ** 2).mean(1).sum()
            else:
                lengths = first.norm(dim=1) * second.norm(dim=1)
                expected += (1 - (first * second).sum(1) / lengths).sum()
    torch.testing.assert_close(added, 0.5 * expected, rtol=1e-4, atol=1e-5)
    loss.backward()
    trained = [weight.grad for weight in student.parameters()]
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in trained)


@pytest.mark.parametrize("kind", ["cosine", "mse"])
def test_gradients_agree_with_finite_differences(kind):
    torch.manual_seed(0)
    part = HiddenStates([(0, 0), (1, 1)], (6, 4), kind).double()
    own = [torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    other = [torch.randn(2, 3, 4, dtype=torch.float64) for _ in range(2)]
    shares = torch.tensor([[1.0, 0.5, 0.0], [0.25, 0.0, 1.0]])
    # The loss is in 32 bits.
    assert torch.autograd.gradcheck(
        lambda *states: part(states, other, shares), own, eps=1e-3, atol=2e-3, rtol=2e-2
    )
    part(own, other, shares).backward()
    assert not own[0].grad[0, 2].any(), "a token without a share is not compared"


def test_validation_and_export_do_not_see_the_projection(tmp_path, batch):
    student = model_of(LLAMA, 0)
    before = token_output(student, batch).logits
    model_of(DEEP, 1).save_pretrained(tmp_path / "teacher")
    attach_comparison(student, configure(tmp_path / "teacher", weight=1.0, loss="mse"))
    assert token_output(student, batch).logits.equal(before)
    student.save_pretrained(tmp_path / "student")
    loaded, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "student", output_loading_info=True
    )
    assert not any(report.values()), report
    assert token_output(loaded.eval(), batch).logits.equal(before)


@pytest.mark.parametrize(
    ("layers", "sizes", "pairs"),
    [
        ("last", (3, 7), [(3, 7)]),
        ("all", (2, 6), [(1, 3), (2, 6)]),
        ([(2, 4), (0, 0)], (3, 7), [(0, 0), (2, 4)]),
    ],
)
def test_layers_that_are_compared(layers, sizes, pairs):
    assert HiddenConfig(weight=1, layers=layers).pairs(*sizes) == pairs


@pytest.mark.parametrize(
    ("layers", "problem"),
    [
        ("all", "the teacher's 7 layers are no multiple of the student's 3"),
        ([(4, 1)], "the student has no layer 4, only 3"),
        ([(1, 8)], "the teacher has no layer 8, only 7"),
    ],
)
def test_layers_that_do_not_fit_are_an_error(layers, problem):
    with pytest.raises(BadInput, match=problem):
        HiddenConfig(weight=1, layers=layers).pairs(3, 7)

"""A head in 4 or 8 bits: its error, loss, and gradients, and the full matrix it never builds."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from steadytrain.components.memory.random_model import LiveTensors
from steadytrain.components.shared.chunks import HEAD_BITS
from steadytrain.components.tasks import loaded_weights
from steadytrain.components.tasks.frozen_parts import FrozenHead
from steadytrain.components.tasks.fused_head import LossRequest, fuse_head, requested
from steadytrain.components.tasks.fused_loss import summed_loss
from steadytrain.components.tasks.loaded_weights import QuantizedMatrix
from steadytrain.components.techniques.base import IGNORED

from support.training import LLAMA, VOCABULARY

CPU, WIDTH, WORDS, ROWS = torch.device("cpu"), 128, 203, 37
ERRORS = {"4bit": 0.092, "8bit": 0.0059}
"""Root-mean-square errors, relative to the weights' own, as documented for users."""
SCALED = {**LLAMA, "model_type": "cohere", "logit_scale": 0.1, "hidden_size": 64}
BITS = pytest.mark.parametrize("bits", ERRORS)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Use blocks of 20 rows, so the last one is not full."""
    monkeypatch.setattr(loaded_weights, "product_rows", lambda width: 20)


def whole(matrix, dtype=torch.float32):
    return matrix.unpacked(slice(None), dtype)


def head(*, bias=True):
    torch.manual_seed(0)
    return torch.nn.Linear(WIDTH, WORDS, bias=bias)


def inputs():
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, ROWS, WIDTH, generator=generator, requires_grad=True)
    targets = torch.randint(0, WORDS, (2, ROWS), generator=generator)
    targets[0, ::3] = IGNORED
    return hidden, targets


@BITS
def test_quantization_error_and_size_are_as_stated(bits):
    torch.manual_seed(0)
    weight = 0.02 * torch.randn(256, 4096)
    matrix = QuantizedMatrix(weight, bits, CPU)
    error = (whole(matrix) - weight).norm() / weight.norm()
    assert error == pytest.approx(ERRORS[bits], rel=0.03)
    size = sum(item.nbytes for item in matrix.parameters())
    assert size == weight.numel() * HEAD_BITS[bits] / 8
    assert not any(item.requires_grad for item in matrix.parameters())


@BITS
def test_zeros_stay_zeros(bits):
    assert not whole(QuantizedMatrix(torch.zeros(41, 64), bits, CPU)).any()


@BITS
def test_blockwise_products_equal_those_of_the_whole_matrix(bits):
    matrix = QuantizedMatrix(head().weight, bits, CPU)
    values, errors = torch.randn(5, WIDTH), torch.randn(5, WORDS)
    torch.testing.assert_close(matrix.product(values), values @ whole(matrix).T)
    torch.testing.assert_close(matrix.transposed_product(errors), errors @ whole(matrix))


@BITS
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_loss_and_gradient_equal_those_of_unpacked_weights(bits, dtype):
    """So the only difference from the plain head is the error of the quantized weights."""
    frozen, (hidden, targets) = FrozenHead(head(), bits, CPU), inputs()
    weight = whole(frozen.matrix)
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        found = summed_loss(hidden, frozen.matrix, frozen.bias, targets)
        logits = functional.linear(hidden, weight, frozen.bias)
        expected = functional.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        unfused = frozen(hidden)
    assert unfused.dtype == logits.dtype
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype is None else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(found, expected, **close)
    torch.testing.assert_close(unfused, logits, **close)
    gradients = [
        torch.autograd.grad(value, hidden, retain_graph=True)[0]
        for value in (found, expected, unfused.square().sum(), logits.square().sum())
    ]
    for ours, theirs in (gradients[:2], gradients[2:]):
        assert ours.dtype == torch.float32
        assert (ours - theirs).norm() <= (1e-5 if dtype is None else 1e-2) * theirs.norm()


@BITS
def test_weights_are_never_unpacked_whole(bits):
    matrix, (hidden, targets) = QuantizedMatrix(head().weight, bits, CPU), inputs()
    seen = []
    with LiveTensors(lambda _, tensor: seen.append(tuple(tensor.shape)) or ""):
        summed_loss(hidden, matrix, None, targets).backward()
    widths = [shape for shape in seen if len(shape) == 2 and shape[1] == WIDTH]
    assert (20, WIDTH) in widths
    assert (WORDS, WIDTH) not in widths
    assert hidden.grad is not None


def model_of(config):
    torch.manual_seed(0)
    built = AutoConfig.for_model(**{**config, "vocab_size": VOCABULARY})
    model = AutoModelForCausalLM.from_config(built, dtype=torch.float32).eval()
    model.set_output_embeddings(FrozenHead(model.get_output_embeddings(), "8bit", CPU))
    return model


def test_model_computes_its_loss_with_the_frozen_head():
    model = model_of({**LLAMA, "hidden_size": 64})
    ids = torch.arange(2, 12).unsqueeze(0)
    logits = model(input_ids=ids).logits
    assert fuse_head(model) == ""
    with requested(LossRequest(ids)) as request:
        model(input_ids=ids)
    expected = functional.cross_entropy(logits[0], ids[0], reduction="sum")
    torch.testing.assert_close(request.loss, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model(input_ids=ids).logits, logits)


def test_model_that_scales_its_logits_still_gives_them():
    model = model_of(SCALED)
    ids = torch.arange(2, 12).unsqueeze(0)
    logits = model(input_ids=ids).logits
    assert "changes its head's output" in fuse_head(model)
    with requested(LossRequest(ids)) as request:
        assert model(input_ids=ids).logits.equal(logits)
    assert request.loss is None

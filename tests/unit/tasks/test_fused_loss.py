"""The fused loss and its gradients equal those of the plain computation, with less memory."""

from __future__ import annotations

import json

import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from steadytrain.components.memory.random_model import LiveTensors
from steadytrain.components.shared.config import AdapterConfig
from steadytrain.components.tasks import fused_loss
from steadytrain.components.tasks.causal_lm import next_token_loss
from steadytrain.components.tasks.frozen_parts import attach
from steadytrain.components.tasks.fused_head import FusedHead, LossRequest, fuse_head, requested
from steadytrain.components.tasks.fused_loss import summed_loss
from steadytrain.components.techniques.base import IGNORED

from support.training import GPT2, LLAMA, VOCABULARY

ROWS, WIDTH, WORDS = (3, 11), 8, 23
TIED = {**LLAMA, "tie_word_embeddings": True}
CAPPED = {**LLAMA, "model_type": "gemma2", "final_logit_softcapping": 30.0, "head_dim": 8}
SCALED = {**LLAMA, "model_type": "cohere", "logit_scale": 0.1}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Use chunks of five rows and of seven words, so that no size here is a multiple of either."""
    monkeypatch.setattr(fused_loss, "chunk_rows", lambda vocabulary: 5)
    monkeypatch.setattr(fused_loss, "product_rows", lambda width: 7)


def some_inputs(*, ignored=0.4):
    torch.manual_seed(0)
    hidden = torch.randn(*ROWS, WIDTH, requires_grad=True)
    weight = torch.randn(WORDS, WIDTH, requires_grad=True)
    bias = torch.randn(WORDS, requires_grad=True)
    targets = torch.randint(0, WORDS, ROWS)
    targets[torch.rand(ROWS) < ignored] = IGNORED
    return hidden, weight, bias, targets


def plain(hidden, weight, bias, targets, smoothing=0.0):
    logits = functional.linear(hidden, weight, bias)
    return functional.cross_entropy(
        logits.flatten(0, 1).float(),
        targets.flatten(),
        ignore_index=IGNORED,
        reduction="sum",
        label_smoothing=smoothing,
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("ignored", [0.0, 0.4, 1.0])
def test_loss_and_gradients_equal_the_plain_computation(ignored, biased, smoothing):
    hidden, weight, bias, targets = some_inputs(ignored=ignored)
    inputs = (hidden, weight, bias) if biased else (hidden, weight)
    found, expected = (
        loss(hidden, weight, bias if biased else None, targets, smoothing)
        for loss in (summed_loss, plain)
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(
        torch.autograd.grad(found / 7, inputs),
        torch.autograd.grad(expected / 7, inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_as_exact_as_the_plain_computation(dtype):
    hidden, weight, _, targets = some_inputs()
    exact = torch.autograd.grad(plain(hidden, weight, None, targets), (hidden, weight))
    found = []
    for loss in (summed_loss, plain):
        with torch.autocast("cpu", dtype):
            total = loss(hidden, weight, None, targets)
        assert total.dtype == torch.float32
        gradients = torch.autograd.grad(total, (hidden, weight))
        assert all(item.dtype == torch.float32 for item in gradients)
        found.append(
            [
                (item - other).norm() / other.norm()
                for item, other in zip(gradients, exact, strict=True)
            ]
        )
    assert all(ours <= 1.5 * theirs for ours, theirs in zip(*found, strict=True))


def test_frozen_parts_cost_nothing(monkeypatch):
    hidden, weight, _, targets = some_inputs()
    expected = torch.autograd.grad(plain(hidden, weight, None, targets), hidden)[0]

    def forbidden(*_):
        raise AssertionError("the head's gradient was computed")

    monkeypatch.setattr(fused_loss, "_add_product", forbidden)
    (found,) = torch.autograd.grad(summed_loss(hidden, weight.detach(), None, targets), hidden)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        loss = summed_loss(hidden, weight, None, targets)
    assert not loss.requires_grad


def test_no_tensor_is_as_large_as_the_logits():
    hidden, weight = torch.randn(40, 4, requires_grad=True), torch.randn(50, 4, requires_grad=True)
    seen = []
    with LiveTensors(lambda _, tensor: seen.append(tensor.numel()) or "") as live:
        summed_loss(hidden, weight, None, torch.zeros(40, dtype=torch.int64)).backward()
    assert live.peak
    assert max(seen) <= 5 * 50


def test_second_backward_is_rejected():
    hidden, weight, bias, targets = some_inputs()
    loss = summed_loss(hidden, weight, bias, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already"):
        loss.backward()


def test_targets_of_another_shape_are_rejected():
    hidden, weight, _, targets = some_inputs()
    with pytest.raises(ValueError, match="no row for each"):
        summed_loss(hidden, weight, None, targets[:, :-1])


def model_of(config):
    torch.manual_seed(0)
    built = AutoConfig.for_model(**{**config, "vocab_size": VOCABULARY})
    return AutoModelForCausalLM.from_config(built, dtype=torch.float32).eval()


def a_batch():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, VOCABULARY, (2, 9), generator=generator)
    return {"input_ids": ids, "targets": torch.where(ids % 3 == 0, IGNORED, ids)}


@pytest.mark.parametrize("config", [LLAMA, TIED, GPT2], ids=["llama", "tied", "gpt2"])
def test_model_learns_the_same_with_a_fused_head(config):
    model, batch = model_of(config), a_batch()
    found = []
    for fused in (False, True):
        assert not fused or fuse_head(model) == ""
        model.zero_grad()
        loss = next_token_loss(model, batch)
        loss.backward()
        found.append([loss.detach(), *(item.grad for item in model.parameters())])
    assert isinstance(model.get_output_embeddings(), FusedHead)
    for plain_one, fused_one in zip(*found, strict=True):
        torch.testing.assert_close(fused_one, plain_one, rtol=1e-5, atol=1e-5)


def test_head_gives_logits_without_targets(tmp_path):
    model, batch = model_of(TIED), a_batch()
    before, names = model(input_ids=batch["input_ids"]).logits, list(model.state_dict())
    assert fuse_head(model) == ""
    assert torch.equal(model(input_ids=batch["input_ids"]).logits, before)
    assert list(model.state_dict()) == names
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [
        "LlamaForCausalLM"
    ]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(input_ids=batch["input_ids"]).logits, before)


@pytest.mark.parametrize("config", [CAPPED, SCALED], ids=["capped", "scaled"])
def test_model_that_changes_its_logits_keeps_the_plain_loss(config):
    model, batch = model_of(config), a_batch()
    before = next_token_loss(model, batch)
    assert fuse_head(model) == "the model changes its head's output"
    assert type(model.get_output_embeddings()) is torch.nn.Linear
    assert torch.equal(next_token_loss(model, batch), before)


def test_head_with_adapters_keeps_the_plain_loss():
    adapted = attach(model_of(LLAMA), AdapterConfig(kind="lora", targets=["lm_head", "q_proj"]))
    assert "peft.tuners.lora" in fuse_head(adapted)
    assert not any(isinstance(module, FusedHead) for module in adapted.modules())


def test_adapters_beside_a_frozen_head_learn_the_same():
    adapted = attach(model_of(LLAMA), AdapterConfig(kind="lora", dropout=0.0)).train()
    batch, found = a_batch(), []
    for fused in (False, True):
        assert not fused or fuse_head(adapted) == ""
        adapted.zero_grad()
        next_token_loss(adapted, batch).backward()
        found.append([item.grad for item in adapted.parameters() if item.requires_grad])
    for plain_one, fused_one in zip(*found, strict=True):
        torch.testing.assert_close(fused_one, plain_one, rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_compiled_model_and_activation_checkpointing_learn_the_same():
    model, batch = model_of(LLAMA).train(), a_batch()
    expected = next_token_loss(model, batch).detach()
    assert fuse_head(model) == ""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.compile(backend="eager")
    for _ in range(2):
        loss = next_token_loss(model, batch)
        torch.testing.assert_close(loss.detach(), expected, rtol=1e-5, atol=1e-5)
        loss.backward()


def test_model_that_never_calls_its_head_is_detected():
    class Headless(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(4, VOCABULARY)

        def get_output_embeddings(self):
            return self.head

        def forward(self, input_ids, use_cache):
            return type("Output", (), {"logits": torch.zeros(1, 4, VOCABULARY)})

    assert fuse_head(Headless()) == "the model does not call its head"
    assert fuse_head(torch.nn.Linear(1, 1)) == "the model does not name its head"
    with requested(LossRequest(torch.zeros(1, 4))) as request:
        pass
    assert request.loss is None

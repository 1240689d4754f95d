"""Kernels that do not work here are left out with a reason, before training starts."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from torch._inductor import config as inductor
from torch._inductor.utils import fresh_inductor_cache

from steadytrain.components.shared.config import load
from steadytrain.components.shared.config.optimizers import DEFAULT
from steadytrain.components.shared.errors import BadInput, ConfigError
from steadytrain.components.shared.toolchain import missing_tools
from steadytrain.components.tasks import fused_loss
from steadytrain.components.train.loop import kernels
from steadytrain.components.train.loop.kernels import usable


@pytest.fixture(scope="module")
def accelerator():
    return Accelerator(cpu=True)


@pytest.fixture(autouse=True)
def liger_is_used_again():
    yield
    fused_loss.use(True)


def config(*sets):
    return load("causal-lm", [*sets])


def test_run_without_optional_kernels_tries_nothing(accelerator):
    before, stated = torch.get_rng_state(), config()
    found = usable(stated, accelerator)
    assert (found.config, found.fused, found.remarks) == (stated, True, ())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
def test_missing_compiler_leaves_out_torch_compile(accelerator):
    before = torch.get_rng_state()
    with fresh_inductor_cache(), inductor.patch({"cpp.cxx": ("/nowhere/g++",)}):
        found = usable(config("training.torch_compile=true"), accelerator)
    assert not found.config.training.torch_compile
    (remark,) = found.remarks
    assert remark.startswith(
        "training.torch_compile does not work here, so this run uses the model"
    )
    assert "InvalidCxxCompiler" in remark
    assert torch.equal(torch.get_rng_state(), before), "the trial draws nothing of the run's"


def broken(*_, **__):
    raise RuntimeError("Failed to find C compiler.\nPlease specify via CC environment variable.")


def test_broken_liger_kernel_is_not_used(accelerator, monkeypatch):
    monkeypatch.setattr(fused_loss, "liger_loss", broken)
    monkeypatch.setattr(fused_loss, "has_kernel_for", lambda _: fused_loss._used)
    found = usable(config(), accelerator)
    assert not fused_loss.has_kernel_for(torch.ones(1))
    (remark,) = found.remarks
    assert "PyTorch's own operators: RuntimeError: Failed to find C compiler." in remark


def test_liger_kernel_with_a_wrong_result_is_not_used(monkeypatch):
    monkeypatch.setattr(fused_loss, "liger_loss", lambda logits, *_, **__: logits.sum())
    with pytest.raises(RuntimeError, match="differs from PyTorch's"):
        fused_loss.try_kernel(torch.device("cpu"))


def test_8_bit_optimizer_that_does_not_load_becomes_the_default(accelerator, monkeypatch):
    import bitsandbytes.optim

    monkeypatch.setattr(bitsandbytes.optim, "AdamW8bit", broken)
    found = usable(config("training.optim=adamw_bnb_8bit"), accelerator)
    assert found.config.training.optim == DEFAULT
    assert DEFAULT in found.remarks[0]


def test_missing_flash_attention_becomes_sdpa(accelerator):
    asked = config("model.config.attn_implementation=flash_attention_2")
    found = usable(asked, accelerator)
    assert found.config.model.config["attn_implementation"] == "sdpa"
    assert "ImportError: FlashAttention2" in found.remarks[0]


@pytest.mark.parametrize(
    ("name", "why"), [("flash_attention_2", "ImportError"), ("flex", "NotImplementedError")]
)
def test_asked_attention_that_cannot_train_here_is_refused(accelerator, name, why):
    with pytest.raises(BadInput, match=rf"training\.attention = '{name}'.*{why}"):
        usable(config(f"training.attention={name}"), accelerator)


def test_attention_is_asked_for_once(accelerator):
    assert usable(config("training.attention=eager"), accelerator).remarks == ()
    with pytest.raises(ConfigError, match="leave one of the two out"):
        config("training.attention=sdpa", "model.config.attn_implementation=eager")


def test_missing_tools_are_in_the_reason(monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/g++")
    assert "CXX=/nowhere/g++" in missing_tools()
    kernel = kernels._Kernel("x", "y", broken)
    assert "missing here: CXX=/nowhere/g++" in kernels._failure(kernel)

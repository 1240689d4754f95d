"""Kernels that are compiled or loaded at first use, each tried once on a small input.

A machine may lack what they need: a compiler, a library, a new enough driver. Without this trial,
that would end the training at its first step. What does not work is left out, on all ranks alike,
with a remark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from accelerate import Accelerator

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.optimizers import DEFAULT, optimizer_spec
from steadytrain.components.shared.toolchain import REMEDY, missing_tools
from steadytrain.components.tasks import fused_loss
from steadytrain.components.train.loop.exchange import gather_objects

_ELEMENTS: Final = 1 << 14
"""Elements of the tensor that an optimizer updates. Smaller ones don't use 8-bit kernels."""
_PLAIN_ATTENTION: Final = "sdpa"
_LIGER: Final = "Liger's kernel for the loss"
_FUSED: Final = "the fused update of the optimizer"
_COMPILE: Final = "training.torch_compile"
_OPTIM: Final = "training.optim"
_ATTENTION: Final = "model.config.attn_implementation"


@dataclass(frozen=True)
class Usable:
    """A run with the kernels that work here.

    config: without the settings that do not work.
    fused: whether Adam's fused update works.
    remarks: what does not work and what is used instead, with the reason.
    """

    config: RunConfig
    fused: bool = True
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Kernel:
    """A kernel that a run would use.

    instead: what is used if it does not work.
    trial: uses it once, and raises if it does not work.
    """

    name: str
    instead: str
    trial: Callable[[], object]


def usable(config: RunConfig, accelerator: Accelerator) -> Usable:
    """Try what the run would use, and return what works on every rank."""
    kernels = list(_kernels(config, accelerator))
    everyones = gather_objects([[_failure(kernel) for kernel in kernels]])
    found = [next(filter(None, reasons), "") for reasons in zip(*everyones, strict=True)]
    broken = {kernel.name: why for kernel, why in zip(kernels, found, strict=True) if why}
    remarks = tuple(
        f"{kernel.name} does not work here, so this run uses {kernel.instead}: "
        f"{broken[kernel.name]}"
        for kernel in kernels
        if kernel.name in broken
    )
    fused_loss.use(_LIGER not in broken)
    return Usable(_without(config, broken), _FUSED not in broken, remarks)


def _kernels(config: RunConfig, accelerator: Accelerator) -> Iterator[_Kernel]:
    device, training = accelerator.device, config.training
    if fused_loss.has_kernel_for(torch.empty(0, device=device)):
        yield _Kernel(_LIGER, "PyTorch's own operators", lambda: fused_loss.try_kernel(device))
    if training.torch_compile:
        yield _Kernel(_COMPILE, "the model as it is", lambda: _compile(device))
    spec = optimizer_spec(training.optim)
    if "cpu" in spec.unsupported:
        instead = f"{DEFAULT}, whose moments take more memory"
        yield _Kernel(_OPTIM, instead, lambda: _step(config, device, training.optim))
    elif device.type != "cpu" and accelerator.scaler is None:
        yield _Kernel(_FUSED, "an update of one tensor at a time", lambda: _fused(device))
    chosen = (config.model.config or {}).get("attn_implementation")
    if chosen not in (None, "eager", _PLAIN_ATTENTION):
        yield _Kernel(_ATTENTION, _PLAIN_ATTENTION, lambda: _attention(str(chosen)))


def _failure(kernel: _Kernel) -> str:
    """Return why a kernel does not work; "" if it does."""
    try:
        # The trial must not change what the run draws at random.
        with torch.random.fork_rng():
            kernel.trial()
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        why = f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"
        missing = missing_tools()
        return f"{why}; missing here: {', '.join(missing)}; {REMEDY}" if missing else why
    return ""


def _without(config: RunConfig, broken: dict[str, str]) -> RunConfig:
    training: dict[str, Any] = {}
    if _COMPILE in broken:
        training["torch_compile"] = False
    if _OPTIM in broken:
        training["optim"] = DEFAULT
    update: dict[str, Any] = {}
    if training:
        update["training"] = config.training.model_copy(update=training)
    if _ATTENTION in broken:
        fields = {**(config.model.config or {}), "attn_implementation": _PLAIN_ATTENTION}
        update["model"] = config.model.model_copy(update={"config": fields})
    return config.model_copy(update=update) if update else config


def _compile(device: torch.device) -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).to(device)
    layer.compile(dynamic=True)
    try:
        layer(torch.ones(2, 8, device=device)).sum().backward()
    finally:
        # The number of compilations of one function is limited.
        torch.compiler.reset()


def _step(config: RunConfig, device: torch.device, optim: str) -> None:
    weight = torch.nn.Parameter(torch.ones(_ELEMENTS, device=device))
    training = config.training.model_copy(update={"optim": optim})
    groups = [{"params": [weight], "lr": training.learning_rate or 1e-3, "weight_decay": 0.0}]
    optimizer = optimizer_spec(optim).build(groups, training, scaled=False)
    _update(optimizer, weight)


def _fused(device: torch.device) -> None:
    weight = torch.nn.Parameter(torch.ones(_ELEMENTS, device=device))
    _update(torch.optim.AdamW([weight], fused=True), weight)


def _update(optimizer: Any, weight: torch.nn.Parameter) -> None:
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    if bool((weight == 1).any()):
        raise RuntimeError("an update changes nothing")


def _attention(name: str) -> None:
    """Build a layer of a tiny model with an attention. Transformers checks that it is there."""
    from transformers import AutoModel, LlamaConfig

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 8}
    tiny = LlamaConfig(**sizes, num_attention_heads=2, attn_implementation=name)
    AutoModel.from_config(tiny)

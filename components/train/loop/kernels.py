"""Kernels that are compiled or loaded at first use, each tried once on a small input.

A machine may lack what they need: a compiler, a library, a new enough driver. Without this trial,
that would end the training at its first step. What does not work is left out, on all ranks alike,
with a remark.

torch.compile compiles layer by layer and in place: equal layers share one compilation, and tensors
keep their names. What cannot be compiled (attention by document, the fused loss) stays out of the
graph.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from accelerate import Accelerator

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.optimizers import DEFAULT, optimizer_spec
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.toolchain import REMEDY, missing_tools
from steadytrain.components.tasks import fused_loss
from steadytrain.components.tasks.models import attention_name
from steadytrain.components.train.failures import CompiledCodeDamaged
from steadytrain.components.train.loop.exchange import gather_objects

_ELEMENTS: Final = 1 << 14
"""Elements of the tensor that an optimizer updates. Smaller ones don't use 8-bit kernels."""
_PLAIN_ATTENTION: Final = "sdpa"
_LIGER: Final = "Liger's kernel for the loss"
_FUSED: Final = "the fused update of the optimizer"
_COMPILE: Final = "training.torch_compile"
_OPTIM: Final = "training.optim"
_ATTENTION: Final = "model.config.attn_implementation"
_ASKED_ATTENTION: Final = "training.attention"


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
    """Try what the run would use, and return what works on every rank.

    Raises:
        BadInput: `training.attention` does not work on a rank.
    """
    kernels = list(_kernels(config, accelerator))
    everyones = gather_objects([[_failure(kernel) for kernel in kernels]])
    result = [next(filter(None, reasons), "") for reasons in zip(*everyones, strict=True)]
    broken = {kernel.name: why for kernel, why in zip(kernels, result, strict=True) if why}
    if _ASKED_ATTENTION in broken:
        raise BadInput(
            f"{_ASKED_ATTENTION} = {config.training.attention!r}: it does not work here: "
            f"{broken[_ASKED_ATTENTION]}",
            remedy=f"install what it needs, or set it to {_PLAIN_ATTENTION}",
        )
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
    if spec.own_kernels or "cpu" in spec.unsupported:
        instead = f"{DEFAULT}, whose moments take more memory"
        yield _Kernel(_OPTIM, instead, lambda: _step(config, device, training.optim))
    elif device.type != "cpu" and accelerator.scaler is None:
        yield _Kernel(_FUSED, "an update of one tensor at a time", lambda: _fused(device))
    asked = attention_name(training.attention)
    if asked not in ("auto", "eager", _PLAIN_ATTENTION):
        yield _Kernel(_ASKED_ATTENTION, "none", lambda: _attention(asked, device))
    chosen = (config.model.config or {}).get("attn_implementation")
    if chosen not in (None, "eager", _PLAIN_ATTENTION):
        yield _Kernel(_ATTENTION, _PLAIN_ATTENTION, lambda: _attention(str(chosen), device))


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


def _attention(name: str, device: torch.device) -> None:
    """Build a layer of a tiny model with an attention. Transformers checks that it is there."""
    if name == "flex_attention" and device.type == "cpu":
        from torch.nn.attention.flex_attention import flex_attention

        # PyTorch refuses to train with it there, at the first forward pass.
        tensor = torch.ones(1, 1, 16, 16, requires_grad=True)
        flex_attention(tensor, tensor, tensor)
    from transformers import AutoModel, LlamaConfig

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 8}
    tiny = LlamaConfig(**sizes, num_attention_heads=2, attn_implementation=name)
    AutoModel.from_config(tiny)


_VARIABLE: Final = "TORCHINDUCTOR_CACHE_DIR"
_log = logging.getLogger(__name__)


def compile_layers(model: Any) -> None:
    """Compile each layer that Transformers lists, or the whole model if it lists none.

    Compile for any number of tokens from the first step on. Code specialized for the first step's
    token count would make a resumed run, which starts with a different batch, compute different
    bits.
    """
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    layers = [item for item in model.modules() if type(item).__name__ in kinds]
    for layer in layers or [model]:
        layer.compile(dynamic=True)


def keep_compiled(folder: Path) -> bool:
    """Keep compiled code in a folder, where later attempts find it, even from other pods.

    If the user has set TORCHINDUCTOR_CACHE_DIR, it stays as it is.

    Returns:
        Whether the folder has code of an earlier attempt, which will be used.
    """
    # Import late: few runs need it. On import, PyTorch sets the variable to its own default.
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    usual = default_cache_dir()
    if os.environ.get(_VARIABLE, usual) != usual:
        return False
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        result = folder.lstat()
    except OSError as error:
        _log.warning("%s; compiled code is not kept", error)
        return False
    if result.st_uid != os.getuid() or result.st_mode & 0o022 or not stat.S_ISDIR(result.st_mode):
        # Code found in this folder would be executed.
        _log.warning("%s: other users can write there; compiled code is not kept", folder)
        return False
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        _log.warning("%s: it cannot be written; compiled code is not kept", folder)
        return False
    os.environ[_VARIABLE] = str(folder)
    return any(folder.iterdir())


def without_damaged(error: BaseException, folder: Path) -> BaseException:
    """Remove the folder after an error in torch.compile, and return an error that says so.

    A file truncated by a power loss or a full disk would end every later attempt otherwise. Other
    errors are returned unchanged, and so are errors for lack of memory or disk space.
    """
    import torch

    compiling = type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))
    cause = getattr(error, "inner_exception", error)
    if not compiling or isinstance(cause, (OSError, MemoryError, torch.OutOfMemoryError)):
        return error
    shutil.rmtree(folder, ignore_errors=True)
    return CompiledCodeDamaged(folder, cause)

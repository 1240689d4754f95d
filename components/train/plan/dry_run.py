"""Peak memory of a rank by a step on fake tensors: the real operators, without numbers.

What fakes cannot run (DeepSpeed, 4-bit weights, 8-bit optimizers, offloading, CUDA's kernels) is
run the nearest way that they can, and the formula's difference between the two is added.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import torch
import torch.distributed as dist
from accelerate.utils import convert_outputs_to_fp32
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from steadytrain.components.shared.config import TrainingConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tasks.base import Batch
from steadytrain.components.train.loop.optim import build_optimizer
from steadytrain.components.train.loop.setup import recompute_activations
from steadytrain.components.train.plan.live_tensors import LiveTensors
from steadytrain.components.train.plan.memory import Memory, peak_memory
from steadytrain.components.train.plan.random_model import loss_of, random_model
from steadytrain.components.train.plan.setting import Setting
from steadytrain.components.train.plan.shape import shape_of
from steadytrain.components.train.strategy.fully_sharded import shard

_WHOLE: Final = 40
"""Layers, up to which all are run; of more, two numbers of them, and a line through the two."""
_SOME: Final = (12, 24)
_COLLECTIVES: Final = ("fsdp", "c10d", "_c10d_functional")
_FORWARD: Final = "the forward pass"
_BACKWARD: Final = "the backward pass"
_UPDATE: Final = "the update"


def dry_run(architecture: Mapping[str, Any], setting: Setting, *, labels: int = 0) -> Memory:
    """The peak of a rank's memory over a step that is not the first.

    Args:
        architecture: Transformers' configuration of the model, `model_type` included.
        labels: classes of a classification head; 0: a language model's head.

    Raises:
        BadInput: the formula does not know the architecture, or fakes cannot run it.
    """
    shape, nearest = shape_of(architecture, labels=labels), _nearest(setting, labels)
    try:
        found = _run(architecture, nearest, labels, shape.layers)
    except BadInput:
        raise
    except Exception as error:
        # Whatever Transformers or the fakes say of a model: the training may, or may not.
        told = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise BadInput(
            f"the dry run of this model fails: {told}",
            remedy="plan by formula (--formula), and try a few steps of the training",
        ) from error
    return _moved(found, peak_memory(shape, nearest), peak_memory(shape, setting))


def _nearest(setting: Setting, labels: int) -> Setting:
    """What fakes can run: one rank with all gradients for DDP, FSDP for ZeRO.

    Padding is masked in any case: whether there is some Transformers reads off values, which fakes
    lack.
    """
    shares = setting.shards_optimizer and setting.ranks > 1
    kind = "none" if setting.adapter.kind == "none" else "lora"
    return replace(
        setting,
        precision="bf16" if setting.half else "fp32",
        masked=setting.masked or labels > 0,
        strategy="fsdp" if shares else "single",
        ranks=setting.ranks if shares else 1,
        accumulates=setting.accumulates or setting.strategy == "ddp",
        offload="none",
        adapter=setting.adapter.model_copy(update={"kind": kind}),
        optim="adamw_torch",
        cuda=False,
    )


def _run(architecture: Mapping[str, Any], setting: Setting, labels: int, layers: int) -> Memory:
    if layers <= _WHOLE:
        return _step(architecture, setting, labels)
    few, more = (_step(_cut(architecture, some), setting, labels) for some in _SOME)
    return _drawn_on(few, more, (layers - _SOME[0]) / (_SOME[1] - _SOME[0]))


def _cut(architecture: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """With fewer layers; what a configuration says of each layer goes with them."""
    field = "n_layer" if "n_layer" in architecture else "num_hidden_layers"
    kept = {name: value for name, value in architecture.items() if name != "layer_types"}
    return {**kept, field: layers}


def _drawn_on(few: Memory, more: Memory, times: float) -> Memory:
    """The line through two memories: each layer takes what the one before it takes."""
    parts = {
        name: size + int((more.parts[name] - size) * times) for name, size in few.parts.items()
    }
    return Memory.of_parts(parts, more.moment)


def _moved(found: Memory, ran: Memory, meant: Memory) -> Memory:
    """A difference that is more than a part has goes on to the activations, which all share."""
    parts = {name: size + meant.parts[name] - ran.parts[name] for name, size in found.parts.items()}
    lacking = sum(min(size, 0) for size in parts.values())
    parts = {name: max(size, 0) for name, size in parts.items()}
    parts["activations"] += lacking
    return replace(Memory.of_parts(parts, found.moment), host=meant.host)


def _step(architecture: Mapping[str, Any], setting: Setting, labels: int) -> Memory:
    """One micro-batch and one update, with the state of earlier ones."""
    vocabulary = int(architecture["vocab_size"])
    live = LiveTensors(lambda operator, tensor: _kind(operator, tensor, vocabulary))
    # Real, since attention needs the values.
    lengths = torch.tensor([setting.length] * setting.micro_batch, dtype=torch.int32)
    with _mesh(setting) as mesh, FakeTensorMode(allow_non_fake_inputs=True), live:
        # Where nothing is computed it is made at once.
        with torch.device("meta"):
            model = random_model(architecture, setting, labels)
        _fake(model)
        _prepare(model, setting, mesh)
        for tensor in (*model.parameters(), *model.buffers()):
            live.rename(tensor, "weights")
        optimizer = _with_state(model, setting, live)
        batch = _batch(setting, labels)
        for tensor in batch.values():
            live.rename(tensor, "buffers")
        if not setting.masked:
            batch["lengths"] = lengths
        live.begin()
        live.now = _FORWARD
        loss = loss_of(labels)(model, batch)
        live.now = _BACKWARD
        loss.backward()  # type: ignore[no-untyped-call]
        live.now = _UPDATE
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return Memory.of_parts(live.at_peak, live.moment)


@contextlib.contextmanager
def _mesh(setting: Setting) -> Iterator[DeviceMesh | None]:
    """Of ranks that nobody runs, whose collectives do nothing."""
    if setting.ranks == 1:
        yield None
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=setting.ranks)
    try:
        yield init_device_mesh("cpu", (setting.ranks,))
    finally:
        dist.destroy_process_group()


def _fake(model: torch.nn.Module) -> None:
    """Puts fakes for what is on the meta device; what is tied stays tied."""
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    fake = torch.empty_like(tensor, device="cpu")
                    if isinstance(tensor, torch.nn.Parameter):
                        fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
                    made[id(tensor)] = fake
                held[name] = made[id(tensor)]  # type: ignore[assignment]


def _prepare(model: Any, setting: Setting, mesh: DeviceMesh | None) -> None:
    if setting.recompute:
        recompute_activations(model, configured=True)
    if mesh is not None:
        shard(model, mesh, bf16=setting.half)
    elif setting.half:
        # As accelerate does it.
        model.forward = convert_outputs_to_fp32(
            torch.autocast("cpu", torch.bfloat16)(model.forward)
        )
    model.train()


def _with_state(
    model: torch.nn.Module, setting: Setting, live: LiveTensors
) -> torch.optim.Optimizer:
    """An optimizer after its first update; gradients are there where they wait for more."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
        live.rename(parameter.grad, "gradients")
        parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda parameter: live.rename(parameter.grad, "gradients")
        )
    optimizer = build_optimizer(model, TrainingConfig(learning_rate=1.0))
    optimizer.step()
    for state in optimizer.state.values():
        for tensor in state.values():
            live.rename(tensor, "optimizer")
    if not setting.accumulates:
        optimizer.zero_grad()
    return optimizer


def _batch(setting: Setting, labels: int) -> Batch:
    """A micro-batch as the tasks' `collate` makes them."""
    rows, length = setting.micro_batch, setting.length
    # Packed documents lie in one row.
    shape = (rows, length) if setting.masked else (1, rows * length)
    tokens = torch.zeros(shape, dtype=torch.int64)
    if labels:
        targets = torch.zeros(setting.micro_batch, dtype=torch.int64)
        return {"input_ids": tokens, "attention_mask": tokens.clone(), "targets": targets}
    return {"input_ids": tokens, "position_ids": tokens.clone(), "targets": tokens.clone()}


def _kind(operator: Any, tensor: torch.Tensor, vocabulary: int) -> str:
    """Which of a plan's parts an operator's result belongs to."""
    if operator.namespace in _COLLECTIVES:
        return "buffers"
    logits = tensor.dim() > 1 and tensor.shape[-1] == vocabulary
    return "logits and loss" if logits else "activations"

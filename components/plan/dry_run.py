"""Peak memory of a rank, from a step on fake tensors: the real operators, but no numbers.

Fakes can't run DeepSpeed, 4-bit weights, 8-bit optimizers, offloading or CUDA kernels, and neither
training components nor teachers run. All run as the closest setting that fakes support, and the
formula's difference between the two is added.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from steadytrain.components.memory.live_tensors import LiveTensors, first_tensor
from steadytrain.components.memory.model import any_shape
from steadytrain.components.memory.peak import Memory, peak_memory
from steadytrain.components.memory.random_model import (
    Sample,
    batch_of,
    fake,
    fake_mode,
    layers_in,
    loss_of,
    random_model,
    sample_layers,
    stacks_of,
    with_layers,
)
from steadytrain.components.memory.setting import Setting
from steadytrain.components.memory.shape import Shape
from steadytrain.components.shared.config import TrainingConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.train.loop.optim import OptimizerBuilder
from steadytrain.components.train.strategy.fully_sharded import shard


class Moment(NamedTuple):
    """A part of a step: what runs in a phase, in a list of layers.

    place: of a layer; or what comes before or after the layers.
    """

    phase: str
    stack: int = 0
    place: int | str = "before"


_COLLECTIVES: Final = ("fsdp", "c10d", "_c10d_functional")
_FORWARD: Final = "the forward pass"
_BACKWARD: Final = "the backward pass"
_UPDATE: Final = "the update"


def dry_run(
    architecture: Mapping[str, Any],
    setting: Setting,
    *,
    labels: int = 0,
    shape: Shape | None = None,
) -> Memory:
    """Return the peak of a rank's memory during a step other than the first.

    Args:
        architecture: Transformers' configuration of the model, including `model_type`.
        labels: classes of a classification head; 0 for a language model's head.
        shape: of the model, if parameters of it are frozen.

    Raises:
        BadInput: the architecture is unknown or can't be built, or fakes can't run it.
    """
    shape, nearest = shape or any_shape(architecture, labels), _nearest(setting, labels)
    try:
        found = _run(architecture, nearest, labels)
    except BadInput:
        raise
    except Exception as error:
        # Transformers or the fakes can fail in any way here. Training itself may still work.
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise BadInput(
            f"the dry run of this model fails: {reason}",
            remedy="plan by formula (--formula), and try a few training steps",
        ) from error
    # The dry run trains all parameters; the formula takes off what frozen ones save.
    ran = peak_memory(replace(shape, frozen=0, still=0), nearest)
    return _moved(found, ran, peak_memory(shape, setting))


def _nearest(setting: Setting, labels: int) -> Setting:
    """Return what fakes can run: one rank with all gradients for DDP, FSDP for ZeRO.

    Padding is always masked: Transformers detects it from values, which fakes don't have. Nor do
    fakes say which tokens have a target.
    """
    shares = setting.shards_optimizer and setting.ranks > 1
    kind = "none" if setting.adapter.kind == "none" else "lora"
    return Setting(
        length=setting.length,
        micro_batch=setting.micro_batch * setting.copies,
        precision="bf16" if setting.half else "fp32",
        recompute=setting.recompute,
        masked=setting.masked or labels > 0,
        accumulates=setting.accumulates or setting.exchanges,
        strategy="fsdp" if shares else "single",
        ranks=setting.ranks if shares else 1,
        # Memory on the host would count as the device's.
        adapter=setting.adapter.model_copy(update={"kind": kind, "frozen_embeddings": "device"}),
        cuda=False,
    )


def _run(architecture: Mapping[str, Any], setting: Setting, labels: int) -> Memory:
    """Return the peak. Of many equal layers, a few run twice: once with some more of them."""
    sample = sample_layers(architecture, labels)
    if sample is None:
        return max(_step(architecture, setting, labels).values(), key=_total)
    few, more = (
        _outermost(_step(with_layers(architecture, layers), setting, labels), layers, sample)
        for layers in (sample.few, sample.more)
    )
    times = (sample.layers - sample.few) / sample.period
    return max((_drawn_on(few[key], more[key], times) for key in more), key=_total)


def _outermost(
    moments: Mapping[Moment, Memory], layers: int, sample: Sample
) -> dict[Moment, Memory]:
    """Return the peaks of the first layers, of the last layers, and of what is around them.

    What is alive changes evenly from layer to layer, so the peak is never in between. And each of
    these peaks grows evenly with the number of layers, which the peak of the step does not.
    """
    found: dict[Moment, Memory] = {}
    for moment, memory in moments.items():
        ends: Iterable[str | int] = (moment.place,)
        if isinstance(moment.place, int):
            ends = compress(("first", "last"), sample.is_outer(moment.place, layers))
        for end in ends:
            key = moment._replace(place=end)
            found[key] = max(found.get(key, memory), memory, key=_total)
    return found


def _total(memory: Memory) -> int:
    return memory.total


def _drawn_on(few: Memory, more: Memory, times: float) -> Memory:
    """Extrapolate linearly from two measurements."""
    parts = {
        name: size + int((more.parts[name] - size) * times) for name, size in few.parts.items()
    }
    return Memory.of_parts(parts, more.moment)


def _moved(found: Memory, ran: Memory, meant: Memory) -> Memory:
    """Add the formula's difference. If a part gets negative, the activations cover the rest."""
    parts = {
        name: found.parts.get(name, 0) + size - ran.parts.get(name, 0)
        for name, size in meant.parts.items()
    }
    lacking = sum(min(size, 0) for size in parts.values())
    parts = {name: max(size, 0) for name, size in parts.items()}
    parts["activations"] += lacking
    return replace(Memory.of_parts(parts, found.moment), host=meant.host)


def _step(architecture: Mapping[str, Any], setting: Setting, labels: int) -> dict[Moment, Memory]:
    """Run one micro-batch and one update, with the state of earlier ones.

    Returns:
        The peak of each moment.
    """
    vocabulary = any_shape(architecture, labels).vocabulary
    live = LiveTensors(lambda operator, tensor: _kind(operator, tensor, vocabulary))
    with _mesh(setting) as mesh, fake_mode(), live:
        # The meta device computes nothing, so building the model is instant.
        with torch.device("meta"):
            model = random_model(architecture, setting, labels)
        fake(model)
        _prepare(model, setting, mesh)
        for tensor in (*model.parameters(), *model.buffers()):
            live.rename(tensor, "weights")
        training = TrainingConfig(learning_rate=1.0)
        optimizer = with_state(model, live, training, accumulates=setting.accumulates)
        batch = batch_of(setting, labels)
        for tensor in batch.values():
            live.rename(tensor, "buffers")
        if not setting.masked:
            batch["lengths"] = [setting.length] * setting.micro_batch
        _watch(stacks_of(model, layers_in(architecture, labels)), live)
        live.begin()
        live.now = Moment(_FORWARD)
        loss = loss_of(labels)(model, batch)
        live.now = Moment(_BACKWARD)
        loss.backward()  # type: ignore[no-untyped-call]
        live.now = Moment(_UPDATE)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return {now: Memory.of_parts(parts, now.phase) for now, parts in live.peaks.items()}


def _watch(stacks: Sequence[torch.nn.ModuleList], live: LiveTensors) -> None:
    """Let the layers set the moment: which one computes, forward or backward."""

    def begins(stack: int, place: int, *_: Any) -> None:
        # A layer also begins in the backward pass, if that recomputes its activations.
        if live.now.phase == _FORWARD:
            live.now = Moment(_FORWARD, stack, place)

    def ends(stack: int, place: int, *given: Any) -> None:
        output = first_tensor(given[-1])
        if live.now.phase == _FORWARD and output.requires_grad:
            now = Moment(_BACKWARD, stack, place)
            output.register_hook(lambda _: setattr(live, "now", now))  # type: ignore[no-untyped-call]
        if live.now == Moment(_FORWARD, stack, len(stacks[stack]) - 1):
            live.now = Moment(_FORWARD, stack, "after")

    for stack, layers in enumerate(stacks):
        for place, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(begins, stack, place))
            layer.register_forward_hook(partial(ends, stack, place))


@contextlib.contextmanager
def _mesh(setting: Setting) -> Iterator[DeviceMesh | None]:
    """Create a mesh of ranks that don't exist; its collectives do nothing."""
    if setting.ranks == 1:
        yield None
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=setting.ranks)
    try:
        yield init_device_mesh("cpu", (setting.ranks,))
    finally:
        dist.destroy_process_group()


def _prepare(model: Any, setting: Setting, mesh: DeviceMesh | None) -> None:
    if setting.recompute:
        # Imported late, because it imports what reads the data.
        from steadytrain.components.train.loop.setup import recompute_activations

        recompute_activations(model, configured=True)
    if mesh is not None:
        shard(model, mesh, bf16=setting.half)
    elif setting.half:
        from accelerate.utils import convert_outputs_to_fp32

        # As accelerate does it.
        model.forward = convert_outputs_to_fp32(
            torch.autocast("cpu", torch.bfloat16)(model.forward)
        )
    model.train()


def with_state(
    model: torch.nn.Module, live: LiveTensors, training: TrainingConfig, *, accumulates: bool
) -> torch.optim.Optimizer:
    """Return an optimizer after its first update; keep the gradients if they accumulate."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
        live.rename(parameter.grad, "gradients")
        parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda parameter: live.rename(parameter.grad, "gradients")
        )
    optimizer = OptimizerBuilder(training)(model)
    optimizer.step()
    for state in optimizer.state.values():
        for tensor in state.values():
            live.rename(tensor, "optimizer")
    if not accumulates:
        optimizer.zero_grad()
    return optimizer


def _kind(operator: Any, tensor: torch.Tensor, vocabulary: int) -> str:
    """Return the part of a plan that an operator's result belongs to."""
    if operator.namespace in _COLLECTIVES:
        return "buffers"
    logits = tensor.dim() > 1 and tensor.shape[-1] == vocabulary
    return "logits and loss" if logits else "activations"

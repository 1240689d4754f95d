"""The training state as named tensors, and back: of a model, and of an optimizer by its spec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from steadytrain.components.shared.config.optimizers import OptimizerSpec
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.train.checkpoint.checkpoint import Checkpoint, of_another_model
from steadytrain.components.train.checkpoint.snapshot import Region, whole

Tensors = dict[str, torch.Tensor]
RegionOf = Callable[[torch.Tensor], Region]


def model_tensors(model: torch.nn.Module) -> Tensors:
    """Return the parameters, tied ones once, and the persistent buffers.

    If the model has adapters, frozen base weights are left out: they never change.
    """
    persistent = model.state_dict(keep_vars=True).keys()
    buffers = {name: item for name, item in model.named_buffers() if name in persistent}
    adapted = hasattr(model, "peft_config")
    held = {
        name: item for name, item in model.named_parameters() if item.requires_grad or not adapted
    }
    return {**held, **buffers}


def restore_model(model: torch.nn.Module, checkpoint: Checkpoint, region: RegionOf = whole) -> None:
    """Copy a checkpoint's weights into a model that has the same names and sizes.

    Args:
        region: returns the region of a tensor that this rank holds.

    Raises:
        CheckpointDamaged: the checkpoint differs from what was written, or is of another model.
    """
    tensors = model_tensors(model)
    differing = tensors.keys() ^ checkpoint.outline("model").keys()
    if differing:
        raise of_another_model(min(differing))
    checkpoint.copy_into("model", {name: region(tensor) for name, tensor in tensors.items()})


def optimizer_tensors(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, spec: OptimizerSpec
) -> Tensors:
    """Return the per-parameter state as `<parameter>/<key>`. Python numbers become tensors.

    Raises:
        BadInput: the state is not what the spec says.
    """
    result = {}
    for name, parameter in model.named_parameters():
        for key, tensor in state_tensors(optimizer, parameter, spec).items():
            result[f"{name}/{key}"] = tensor
    return result


def state_tensors(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, spec: OptimizerSpec
) -> Tensors:
    """Return one parameter's state by key; see `optimizer_tensors`."""
    shaped = {tensor.name for tensor in spec.tensors if tensor.same_shape}
    known = {tensor.name for tensor in spec.tensors} | {*spec.scalars, *spec.numbers}
    result = {}
    for key, value in optimizer.state.get(parameter, {}).items():
        if value is None:
            continue
        tensor = value if torch.is_tensor(value) else _as_tensor(value)
        if key not in known or (key in shaped and tensor.shape != parameter.shape):
            raise BadInput(
                f"{type(optimizer).__name__} keeps {key!r} of shape {[*tensor.shape]} for a "
                f"parameter of shape {[*parameter.shape]}, and its OptimizerSpec does not say so",
                remedy="describe every entry of optimizer.state[parameter] in tensors, scalars or "
                "numbers of the spec that training.optim names",
            )
        result[key] = tensor
    return result


def _as_tensor(value: float) -> torch.Tensor:
    # A Python float is 64 bits wide.
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def optimizer_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups' settings (learning rate and so on) as plain data."""
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def restore_groups(optimizer: torch.optim.Optimizer, settings: list[dict[str, Any]]) -> None:
    """Restore the result of `optimizer_settings`."""
    for group, before in zip(optimizer.param_groups, settings, strict=True):
        group.update(before)


def allocate(
    optimizer: torch.optim.Optimizer,
    parameter: torch.Tensor,
    spec: OptimizerSpec,
    saved: Mapping[str, torch.Tensor],
) -> Tensors:
    """Allocate a parameter's state as the first update does, and return it by key.

    Copy the saved content into the result, and then call `settle_numbers`.

    Args:
        saved: tensors of the saved types and shapes by key; their content does not matter.
    """
    state = optimizer.state[parameter]
    if saved and spec.allocate is not None:
        spec.allocate(optimizer, parameter)
    shaped = {tensor.name for tensor in spec.tensors if tensor.same_shape}
    for key, tensor in saved.items():
        if key in shaped and key not in state:
            state[key] = torch.zeros_like(parameter, dtype=tensor.dtype)
        elif not torch.is_tensor(state.get(key)):
            # PyTorch's rule, as in Optimizer.load_state_dict: only these two count on the device.
            beside = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
            host = key in spec.numbers or (key in spec.scalars and not beside)
            device = torch.device("cpu") if host else parameter.device
            state[key] = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
    return {key: state[key] for key in saved}


def settle_numbers(optimizer: torch.optim.Optimizer, spec: OptimizerSpec) -> None:
    """Turn restored tensors back into the Python numbers that the optimizer computes with."""
    for state in optimizer.state.values():
        for key in spec.numbers:
            if torch.is_tensor(state.get(key)):
                state[key] = state[key].item()


def restore_optimizer(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    spec: OptimizerSpec,
    checkpoint: Checkpoint,
    settings: list[dict[str, Any]],
    region: RegionOf = whole,
) -> None:
    """Copy a checkpoint's `optimizer_tensors` into an optimizer, with `optimizer_settings`.

    Args:
        region: returns the region of a tensor that this rank holds.

    Raises:
        CheckpointDamaged: the checkpoint differs from what was written.
    """
    saved = by_parameter(checkpoint.outline("optimizer"))
    regions: dict[str, Region] = {}
    for name, parameter in model.named_parameters():
        state = allocate(optimizer, parameter, spec, saved.get(name, {}))
        regions |= {f"{name}/{key}": region(tensor) for key, tensor in state.items()}
    checkpoint.copy_into("optimizer", regions)
    settle_numbers(optimizer, spec)
    restore_groups(optimizer, settings)


def by_parameter(tensors: Mapping[str, torch.Tensor]) -> dict[str, Tensors]:
    """Return tensors named `<parameter>/<key>` by parameter and key."""
    result: dict[str, Tensors] = {}
    for name, tensor in tensors.items():
        parameter, _, key = name.rpartition("/")
        result.setdefault(parameter, {})[key] = tensor
    return result

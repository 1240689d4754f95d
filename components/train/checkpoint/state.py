"""Convert model and optimizer to named global tensors, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from steadytrain.components.train.checkpoint.checkpoint import of_another_model

Tensors = dict[str, torch.Tensor]


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


@torch.no_grad()
def restore_model(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy tensors into a model that has the same names and sizes.

    Raises:
        CheckpointDamaged: the tensors belong to another model.
    """
    own = model_tensors(model)
    differing = {
        name
        for name in own.keys() | tensors.keys()
        if name not in own or name not in tensors or own[name].numel() != tensors[name].numel()
    }
    if differing:
        raise of_another_model(min(differing))
    for name, tensor in own.items():
        # Tensors from DeepSpeed's flat shards have lost their shape.
        tensor.copy_(tensors[name].view(tensor.shape))


def optimizer_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """Return the per-parameter state as `<parameter>/<key>`. Python numbers become tensors."""
    return {
        f"{name}/{key}": value if torch.is_tensor(value) else torch.tensor(value)
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def optimizer_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups' settings (learning rate and so on) as plain data."""
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def restore_optimizer(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, torch.Tensor],
    settings: list[dict[str, Any]],
) -> None:
    """Restore the results of `optimizer_tensors` and `optimizer_settings`."""
    if hasattr(optimizer, "init_state"):
        _restore_8_bit(model, optimizer, tensors, settings)
        return
    names = {parameter: name for name, parameter in model.named_parameters()}
    shapes = {name: parameter.shape for parameter, name in names.items()}
    by_name: dict[str, Tensors] = {}
    for key, tensor in tensors.items():
        name, _, part = key.rpartition("/")
        by_name.setdefault(name, {})[part] = _shaped(tensor, shapes.get(name))
    # PyTorch's own load puts each tensor on its parameter's device.
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        index: by_name[names[parameter]]
        for index, parameter in enumerate(ordered)
        if names[parameter] in by_name
    }
    numbered = iter(range(len(ordered)))
    groups = [
        {**own, "params": [next(numbered) for _ in group["params"]]}
        for own, group in zip(settings, optimizer.param_groups, strict=True)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _restore_8_bit(
    model: torch.nn.Module,
    optimizer: Any,
    tensors: Mapping[str, torch.Tensor],
    settings: list[dict[str, Any]],
) -> None:
    """Restore into memory that bitsandbytes allocates, since its own load bypasses paged memory."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    optimizer.check_overrides()
    optimizer.initialized = True
    for number, (group, before) in enumerate(zip(optimizer.param_groups, settings, strict=True)):
        group.update(before)
        for place, parameter in enumerate(group["params"]):
            prefix = f"{names[parameter]}/"
            if f"{prefix}step" in tensors:
                optimizer.init_state(group, parameter, number, place)
                state = optimizer.state[parameter]
                for key, value in state.items():
                    saved = tensors[prefix + key]
                    state[key] = value.copy_(saved) if torch.is_tensor(value) else saved.item()


def _shaped(tensor: torch.Tensor, shape: torch.Size | None) -> torch.Tensor:
    """Return the tensor in its parameter's shape. The number of updates stays a scalar."""
    if shape is None or tensor.dim() == 0 or tensor.numel() != shape.numel():
        return tensor
    return tensor.view(shape)

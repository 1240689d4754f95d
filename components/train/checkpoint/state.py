"""Convert a model to named global tensors, and back."""

from __future__ import annotations

from collections.abc import Mapping

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

"""Convert a model to named global tensors, and back."""

from __future__ import annotations

from collections.abc import Callable

import torch

from steadytrain.components.train.checkpoint.checkpoint import Checkpoint, of_another_model
from steadytrain.components.train.checkpoint.region import Region, whole

Tensors = dict[str, torch.Tensor]
Place = Callable[[torch.Tensor], Region]


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


def restore_model(model: torch.nn.Module, checkpoint: Checkpoint, region: Place = whole) -> None:
    """Copy a checkpoint's weights into a model that has the same names and sizes.

    Args:
        region: returns the region of a tensor that this rank holds.

    Raises:
        CheckpointDamaged: the checkpoint differs from what was written, or is of another model.
    """
    own = model_tensors(model)
    differing = own.keys() ^ checkpoint.outline("model").keys()
    if differing:
        raise of_another_model(min(differing))
    checkpoint.copy_into("model", {name: region(tensor) for name, tensor in own.items()})

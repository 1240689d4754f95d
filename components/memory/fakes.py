"""A model and its batches on fake tensors: operators run, but nothing is computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from steadytrain.components.memory.setting import Setting
from steadytrain.components.tasks.base import Batch

LAYER_COUNTS: Final = ("n_layer", "n_layers", "num_layers", "num_hidden_layers")
"""Names that configurations use for their number of layers."""


def with_layers(architecture: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return the configuration with fewer layers, and shorten its per-layer lists to match."""
    field = next((name for name in LAYER_COUNTS if name in architecture), "num_hidden_layers")
    count = architecture.get(field)
    kept: dict[str, Any] = {}
    for name, value in architecture.items():
        if isinstance(value, list) and len(value) == count:
            kept[name] = value[:layers]
        elif name == "text_config" and isinstance(value, Mapping):
            kept[name] = with_layers(value, layers)
        elif name != "layer_types":
            kept[name] = value
    return {**kept, field: layers}


def fake_mode() -> FakeTensorMode:
    """Return a mode in which new tensors are fakes."""
    # PEFT copies a classifier's new head, and with its fakes the mode that they belong to.
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake(model: torch.nn.Module, dtype: torch.dtype | None = None) -> None:
    """Replace tensors on the meta device with fakes; tied tensors stay tied.

    Args:
        dtype: of the floating-point ones; None keeps theirs. Fakes can't be converted later.
    """
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    wanted = dtype if tensor.is_floating_point() else None
                    fake = torch.empty_like(tensor, device="cpu", dtype=wanted)
                    if isinstance(tensor, torch.nn.Parameter):
                        fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
                    made[id(tensor)] = fake
                held[name] = made[id(tensor)]  # type: ignore[assignment]


def batch_of(setting: Setting, labels: int) -> Batch:
    """Return a micro-batch as the tasks' `collate` does."""
    rows, length = setting.micro_batch, setting.length
    # Packed documents share one row.
    shape = (rows, length) if setting.masked else (1, rows * length)
    tokens = torch.zeros(shape, dtype=torch.int64)
    if labels:
        targets = torch.zeros(setting.micro_batch, dtype=torch.int64)
        return {"input_ids": tokens, "attention_mask": tokens.clone(), "targets": targets}
    return {"input_ids": tokens, "position_ids": tokens.clone(), "targets": tokens.clone()}

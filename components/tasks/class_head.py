"""The layer of a Transformers classifier that returns its logits."""

from __future__ import annotations

from typing import Any

import torch

from steadytrain.components.shared.errors import BadInput


def class_head(model: Any) -> tuple[str, torch.nn.Linear]:
    """Return the name and the layer.

    Raises:
        BadInput: the model has no such layer outside of its encoder or decoder.
    """
    inner = f"{model.base_model_prefix}."
    found = [
        (name, layer)
        for name, layer in model.named_modules()
        if type(layer) is torch.nn.Linear
        and layer.out_features == model.config.num_labels
        and not name.startswith(inner)
    ]
    if not found:
        raise BadInput(
            f"{type(model).__name__} has no linear layer for its {model.config.num_labels} labels",
            remedy="use a classifier of Transformers with a linear head",
        )
    return found[-1]


def renew_head(model: Any) -> None:
    """Draw new weights for the head, as Transformers does for a model without one."""
    _, head = class_head(model)
    torch.nn.init.normal_(head.weight, std=getattr(model.config, "initializer_range", 0.02))
    if head.bias is not None:
        torch.nn.init.zeros_(head.bias)

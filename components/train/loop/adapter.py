"""Low-rank adapters beside a model's weights, by PEFT."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from steadytrain.components.shared.config import AdapterConfig
from steadytrain.components.shared.errors import BadInput


def attach(module: torch.nn.Module, adapter: AdapterConfig) -> torch.nn.Module:
    """The model with adapters, which alone are trained, and with whole new heads.

    Raises:
        BadInput: the model has no such layers.
    """
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.scale,
        lora_dropout=adapter.dropout,
        target_modules=adapter.targets or "all-linear",
        modules_to_save=list(_heads(module)) or None,
    )
    try:
        adapted: torch.nn.Module = get_peft_model(module, config)
    except ValueError as error:
        raise BadInput(
            f"model.adapter.targets = {adapter.targets}: {error}",
            remedy="leave it out for all linear layers, or name layers that the model has",
        ) from error
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            # A new head has the base's 16 bits otherwise, too few for what is trained.
            parameter.data = parameter.data.float()
    return adapted


def _heads(module: Any) -> Iterator[str]:
    """What lies beside the base model but the output of words: a classifier begins at random."""
    inner = getattr(module, "base_model_prefix", "")
    words = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    for name, child in module.named_children():
        if name != inner and child is not words and any(True for _ in child.parameters()):
            yield name

"""Low-rank adapters next to a model's weights, by PEFT."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from steadytrain.components.shared.config import AdapterConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tasks.frozen_parts import lighten, tied_tables
from steadytrain.components.tasks.loaded_weights import new_modules


def attach(module: torch.nn.Module, adapter: AdapterConfig) -> torch.nn.Module:
    """Return the model with adapters. Only they and new weights, such as a head, are trained.

    Raises:
        BadInput: the model has no such layers, or its frozen parts cannot be kept as configured.
    """
    from peft import LoraConfig, get_peft_model

    heads = list(_heads(module))
    # Frozen, they would have other random values wherever the base is loaded.
    new = [name for name in new_modules(module) if name.partition(".")[0] not in heads]
    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.scale,
        lora_dropout=adapter.dropout,
        target_modules=adapter.targets or _linear(module),
        exclude_modules=new or None,
        modules_to_save=[*heads, *new] or None,
    )
    tied = tied_tables(module)
    try:
        adapted: torch.nn.Module = get_peft_model(module, config)
    except ValueError as error:
        raise BadInput(
            f"model.adapter.targets = {adapter.targets}: {error}",
            remedy="leave it out for all linear layers, or name layers that the model has",
        ) from error
    by_peft: Any = adapted.base_model
    shared = tied.intersection(by_peft.targeted_module_names)
    if shared:
        # Training would adapt one use of the table, but export adds the adapter to both uses.
        raise BadInput(
            f"model.adapter.targets = {adapter.targets}: {', '.join(sorted(shared))} shares its "
            "weights: the model's embeddings and head are one table",
            remedy="leave it out of the targets, or use a base whose two tables are separate",
        )
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            # Otherwise a new head has the base model's 16 bits, which is too few for training.
            parameter.data = parameter.data.float()
    # A user-defined task may not have called this yet.
    lighten(adapted, adapter)
    return adapted


def _linear(module: Any) -> str | list[str]:
    """Return all linear layers except the output embeddings.

    For a mixture of experts, return names. With "all-linear", PEFT would include the experts'
    stacked weights, which are not linear layers and whose inputs cannot have dropout.
    """
    if not any(parameter.dim() == 3 for parameter in module.parameters()):
        return "all-linear"
    words = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    heads = set(_heads(module))
    return [
        name
        for name, child in module.named_modules()
        if isinstance(child, torch.nn.Linear) and child is not words and name not in heads
    ]


def _heads(module: Any) -> Iterator[str]:
    """Yield the names of modules outside the base model, except the output embeddings.

    A classifier, for example, starts from random weights.
    """
    inner = getattr(module, "base_model_prefix", "")
    words = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    for name, child in module.named_children():
        if name != inner and child is not words and any(True for _ in child.parameters()):
            yield name

"""What a model consists of, based on its modules."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def layers_of(model: torch.nn.Module) -> Sequence[torch.nn.Module]:
    """Return a transformer's layers: the list of modules with the most parameters.

    Raises:
        ValueError: it has no list of modules.
    """
    lists = [
        list(module)
        for module in model.modules()
        if isinstance(module, torch.nn.ModuleList) and len(module)
    ]
    if not lists:
        raise ValueError("its layers are in no list of modules")
    return max(lists, key=lambda layers: sum(count(layer) for layer in layers))


def count(module: torch.nn.Module) -> int:
    """Count the parameters, each one once."""
    return sum(parameter.numel() for parameter in module.parameters())

"""Whether a model drops anything while it trains."""

from __future__ import annotations

from typing import Any, Final

import torch

from steadytrain.components.shared.errors import BadInput

R_DROP: Final = "training.r_drop.weight"


def check_drops(model: torch.nn.Module, field: str, value: object) -> None:
    """Check that two passes of a model differ by their dropout.

    Args:
        field, value: what needs the dropout.

    Raises:
        BadInput: the model has no dropout.
    """
    if not drops(model):
        raise BadInput(
            f"{field} = {value}: the model has no dropout, so both passes would be equal",
            remedy="set model.dropout, or leave it out",
        )


def drops(model: torch.nn.Module) -> bool:
    """Return whether any part of a model drops anything."""
    return any(_drops(module) for module in model.modules())


def _drops(module: torch.nn.Module) -> bool:
    """Return whether it is a dropout layer, or attention with a share of dropout of its own."""
    share: Any = module.p if isinstance(module, torch.nn.Dropout) else 0.0
    own: Any = getattr(module, "attention_dropout", 0.0)
    return share > 0 or (isinstance(own, float) and own > 0)

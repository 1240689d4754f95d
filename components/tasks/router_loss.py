"""The router loss of a mixture of experts: how evenly the tokens are spread over the experts.

From Fedus et al. 2021, "Switch Transformers", equations 4 to 6. Transformers' models compute it in
their forward pass, and add it to their own loss.
"""

from __future__ import annotations

from typing import Any

import torch

from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tasks.model_fields import ROUTER_COEFFICIENTS, ROUTER_ON
from steadytrain.components.techniques.inference import eval_mode


def router_coefficient(model: Any) -> float:
    """Return what the router loss is multiplied by; 0 if the model's configuration turns it off.

    Raises:
        BadInput: the configuration turns it on, and the model has none.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not getattr(base.config.get_text_config(), ROUTER_ON, False):
        return 0.0
    found = (getattr(base, name, None) for name in ROUTER_COEFFICIENTS)
    coefficient = float(next((value for value in found if value is not None), 0.0))
    if coefficient:
        ids = torch.zeros((1, 4), dtype=torch.int64, device=next(model.parameters()).device)
        with eval_mode(model):
            router_loss(model(input_ids=ids, use_cache=False))
    return coefficient


def router_loss(output: Any) -> torch.Tensor:
    """Return the router loss that a model has returned with its logits, a scalar.

    Raises:
        BadInput: it has returned none.
    """
    found = getattr(output, "aux_loss", None)
    if not isinstance(found, torch.Tensor):
        raise BadInput(
            f"the model's configuration has {ROUTER_ON}: true, and the model returns no router "
            "loss",
            remedy="set it to false in the model's configuration",
        )
    return found

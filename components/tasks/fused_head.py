"""A language model's head that computes the loss itself, within the model's forward pass.

It works there, rather than after the model, because FSDP and ZeRO-3 gather the full weights only in
the forward pass. To everything else the head stays the same: same parameters, same names, tied or
not. Without targets, it returns logits.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from steadytrain.components.tasks.eval_mode import eval_mode
from steadytrain.components.tasks.frozen_head import FrozenHead
from steadytrain.components.tasks.loss_request import head_request, request_loss


class FusedHead(torch.nn.Linear):
    """A linear layer that returns the loss, or its input, when that is requested."""

    # In a compiled graph, the targets would be a constant.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  as its base has it
        request = head_request()
        if request is None:
            return super().forward(input)
        return request.answer(input, self.weight, self.bias)


class FusedFrozenHead(FrozenHead):
    """The same for a quantized head."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  as its base has it
        request = head_request()
        if request is None:
            return super().forward(input)
        return request.answer(input, self.matrix, self.bias)


_FUSED: Final = {torch.nn.Linear: FusedHead, FrozenHead: FusedFrozenHead}


def fuse_head(model: Any) -> str:
    """Make the model's head compute the loss, if the model does nothing else with the logits.

    Attach adapters first: they may wrap the head.

    Returns:
        The reason why it cannot. Empty means that it does.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None:
        return "the model does not name its head"
    kind: Any = type(head)
    if kind not in _FUSED:
        return f"the head is not a plain linear layer but {kind.__module__}.{kind.__name__}"
    head.__class__ = _FUSED[kind]
    why = _refusal(model)
    if why:
        head.__class__ = kind
    return why


def _refusal(model: torch.nn.Module) -> str:
    """Test the model itself: a model that scales or caps logits changes its head's output."""
    device = next(model.parameters()).device
    ids = torch.zeros((1, 4), dtype=torch.int64, device=device)
    try:
        with eval_mode(model), request_loss(ids) as request:
            given = model(input_ids=ids, use_cache=False).logits
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        return f"the model uses its head's output for more than logits ({error})"
    if request.loss is None:
        return "the model does not call its head"
    return "" if given is request.loss else "the model changes its head's output"

"""A language model's head that computes the loss itself, within the model's forward pass.

There, and not behind the model, because whoever shares out weights (FSDP, ZeRO-3) has them whole
only there. The head stays where and what it was to everyone else: the same parameters by the same
names, tied or not; and without targets it gives logits.
"""

from __future__ import annotations

from typing import Any

import torch

from steadytrain.components.tasks.asked_loss import asked_loss, asking
from steadytrain.components.tasks.fused_loss import summed_loss
from steadytrain.components.tasks.judged import judged


class FusedHead(torch.nn.Linear):
    """A linear layer whose output, where it is asked for a loss, is that."""

    # Compiled, targets would be a constant of the graph.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  as its base has it
        asked = asked_loss()
        if asked is None:
            return super().forward(input)
        asked.loss = summed_loss(input, self.weight, self.bias, asked.targets)
        return asked.loss


def fuse_head(model: Any) -> str:
    """Has the model's head compute the loss, where that is all that the model does with logits.

    Adapters must be there already: they may wrap the head.

    Returns:
        Why it cannot; empty: it does.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None:
        return "the model names no head"
    if type(head) is not torch.nn.Linear:
        kind = type(head)
        return f"the head is no plain linear layer but {kind.__module__}.{kind.__name__}"
    head.__class__ = FusedHead
    why = _refusal(model)
    if why:
        head.__class__ = torch.nn.Linear
    return why


def _refusal(model: torch.nn.Module) -> str:
    """Asked of the model itself: logits that it scales or caps are others than its head's."""
    device = next(model.parameters()).device
    ids = torch.zeros((1, 4), dtype=torch.int64, device=device)
    try:
        with judged(model), asking(ids) as asked:
            given = model(input_ids=ids, use_cache=False).logits
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        return f"the model makes more of its head's output than logits ({error})"
    if asked.loss is None:
        return "the model does not call its head"
    return "" if given is asked.loss else "the model changes what its head gives"

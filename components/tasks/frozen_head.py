"""A language model's frozen head, in 4 or 8 bits (`model.adapter.frozen_head`)."""

from __future__ import annotations

from typing import Any

import torch

from steadytrain.components.tasks.product_type import product_type
from steadytrain.components.tasks.quantized import Bits, QuantizedMatrix


class FrozenHead(torch.nn.Module):
    """Replaces a linear layer. It returns logits, and gradients of its input only.

    Args:
        device: device of the quantized head. The layer may still be in host memory.
    """

    def __init__(self, head: torch.nn.Linear, bits: Bits, device: torch.device) -> None:
        super().__init__()
        self.matrix = QuantizedMatrix(head.weight, bits, device)
        bias = None if head.bias is None else head.bias.detach().to(device)
        self.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  as a linear layer has it
        dtype = product_type(input.device, self.matrix.dtype)
        logits: torch.Tensor = _Product.apply(input, self.matrix, dtype)
        return logits if self.bias is None else logits + self.bias.to(dtype)


class _Product(torch.autograd.Function):
    """Unpacks the matrix again in backward, instead of keeping it."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, matrix: QuantizedMatrix, dtype: torch.dtype
    ) -> torch.Tensor:
        ctx.matrix, ctx.like = matrix, (hidden.shape, hidden.dtype)
        found = matrix.product(hidden.flatten(0, -2).to(dtype))
        return found.view(*hidden.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        shape, dtype = ctx.like
        found = ctx.matrix.transposed_product(outputs[0].flatten(0, -2))
        return found.view(shape).to(dtype), None, None

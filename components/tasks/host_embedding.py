"""A frozen embedding table in host memory.

The device holds only the rows of a micro-batch, not the table (`model.adapter.frozen_embeddings`).
"""

from __future__ import annotations

import torch
from torch.nn import functional


class HostEmbedding(torch.nn.Module):
    """Replaces an embedding layer, with the same values.

    The table is not a parameter. Moving the module doesn't move it, ranks don't synchronize it, and
    it is not in the module's state dict.

    shape: (words, width). embedding_dim: the width, as an embedding has it.
    """

    def __init__(self, embedding: torch.nn.Embedding) -> None:
        super().__init__()
        self.table = embedding.weight.detach().cpu()
        self.shape = self.table.shape
        self.embedding_dim = self.shape[1]

    # A lookup on a different device breaks a compiled graph anyway.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  as an embedding has it
        return functional.embedding(input.cpu(), self.table).to(input.device)

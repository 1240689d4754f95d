"""How an attempt uses memory while it processes a global batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

REPLICATED: Final = "ddp"
"""The strategy in which each rank has the complete state, including a single rank."""
SINGLE: Final = "single"
"""What a configuration calls it on a single rank."""


@dataclass(frozen=True)
class BatchSettings:
    """What can change between the attempts of a run.

    All but `sequence_length` leave what the model learns as it is.

    micro_batch_size: sequences per forward pass of a rank.
    gradient_checkpointing: whether backward recomputes activations.
    snapshot: whether a checkpoint is copied to host memory before it is written.
    strategy: how the ranks share the state, as in `compute`; never "auto". In a limit, "" keeps the
        strategy.
    offload: which part of the state is in host memory, as in `compute`.
    sequence_length: most tokens of a sequence; 0 keeps the rows as they were prepared.
    """

    micro_batch_size: int
    gradient_checkpointing: bool = False
    snapshot: bool = True
    strategy: str = REPLICATED
    offload: str = "none"
    sequence_length: int = 0

    def strategy_on(self, ranks: int) -> str:
        """Return the strategy as a configuration names it: a single rank replicates nothing."""
        return SINGLE if ranks == 1 and self.strategy == REPLICATED else self.strategy

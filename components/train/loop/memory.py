"""What this training needs of memory at the least."""

from __future__ import annotations

from typing import Any

from steadytrain.components.train.loop.setup import Parts
from steadytrain.components.train.plan.memory import Shape, needed_bytes


def least_memory(parts: Parts) -> int:
    """Bytes of a rank with micro-batch 1 and activation checkpointing, by the formula.

    0 where the model does not say how it is built.
    """
    config: Any = getattr(parts.module, "config", None)
    try:
        shape = Shape(
            parts.parameters,
            tokens=parts.sequence_length or config.max_position_embeddings,
            hidden=config.hidden_size,
            layers=config.num_hidden_layers,
            vocabulary=config.vocab_size,
        )
    except AttributeError:
        return 0
    return needed_bytes(shape, recomputing=True)

"""What this training needs of memory at the least."""

from __future__ import annotations

from steadytrain.components.train.loop.setup import Parts
from steadytrain.components.train.plan.memory import Shape, needed_bytes


def least_memory(parts: Parts) -> int:
    """Bytes of a rank with micro-batch 1 and activation checkpointing, by the formula.

    0 where the model does not say how it is built.
    """
    config = getattr(parts.module, "config", None)
    names = ("hidden_size", "num_hidden_layers", "vocab_size")
    sizes = [getattr(config, name, None) for name in names]
    if not all(isinstance(size, int) for size in sizes):
        return 0
    hidden, layers, vocabulary = sizes
    longest = parts.sequence_length or getattr(config, "max_position_embeddings", 0)
    shape = Shape(parts.parameters, longest, hidden, layers, vocabulary)
    return needed_bytes(shape, recomputing=True)

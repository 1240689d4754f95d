"""What a model's forward pass keeps for the backward pass, in bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of one layer for a micro-batch.

    entry: its input, the only thing kept if the rest is recomputed.
    attention, feed_forward: what their halves keep.
    attention_backward, feed_forward_backward: the most that intermediate gradients need.
    """

    entry: int
    attention: int
    feed_forward: int
    attention_backward: int
    feed_forward_backward: int

    @property
    def kept(self) -> int:
        return self.attention + self.feed_forward


@dataclass(frozen=True)
class Activations:
    """Bytes of a traced model for a micro-batch.

    entry: what the embeddings keep in addition to the first layer's input.
    exit: what the last norm keeps, and the gradient of the head's input.
    loss: what a plain loss needs in addition, including the head's gradient; 0 for a fused one.
    """

    layer: LayerMemory
    entry: int
    exit: int
    loss: int

"""From the global batch, which decides what is learned, to what each rank does at a time."""

from __future__ import annotations

from dataclasses import dataclass

from steadytrain.components.shared.errors import BadInput

LARGEST_DERIVED = 8
"""Sequences of a derived micro-batch at most; a planner that knows the memory may go further."""


@dataclass(frozen=True)
class BatchPlan:
    """How a global batch is cut: micro-batch x accumulation x world size."""

    micro_batch_size: int
    gradient_accumulation_steps: int
    world_size: int

    @property
    def global_batch_size(self) -> int:
        return self.micro_batch_size * self.gradient_accumulation_steps * self.world_size


def plan_batch(global_batch_size: int, world_size: int, micro: int | None = None) -> BatchPlan:
    """Micro-batch and accumulation of each rank.

    Args:
        micro: sequences a forward pass; None: the largest divisor of the rank's share up to 8.

    Raises:
        BadInput: the global batch cannot be cut into equal parts that way.
    """
    if global_batch_size % world_size:
        raise BadInput(
            f"training.global_batch_size = {global_batch_size} is not divisible by "
            f"{world_size} ranks",
            remedy=f"set a multiple of {world_size}, or compute.nproc_per_node to a divisor of it",
        )
    share = global_batch_size // world_size
    if micro is None:
        micro = next(size for size in range(LARGEST_DERIVED, 0, -1) if share % size == 0)
    elif share % micro:
        raise BadInput(
            f"training.micro_batch_size = {micro} does not divide the {share} sequences that "
            "each rank has in a global batch",
            remedy=f"set a divisor of {share}, or leave it out",
        )
    return BatchPlan(micro, share // micro, world_size)

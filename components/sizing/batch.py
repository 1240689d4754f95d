"""From the global batch, which affects what the model learns, to the work of each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from steadytrain.components.shared.errors import BadInput

REPLICATED = "ddp"
"""The strategy in which each rank has the complete state, including a single rank."""
LARGEST_DERIVED = 8
"""Maximum sequences of a derived micro-batch; a planner that knows the memory may exceed it."""


@dataclass(frozen=True)
class BatchPlan:
    """How a global batch is processed: micro-batch x accumulation x world size.

    gradient_checkpointing: whether backward recomputes activations.
    snapshot: whether a checkpoint is copied to host memory before it is written.
    strategy, offload: how the ranks share the state, and which part of it the host keeps, as in
        `compute`; never "auto".
    """

    micro_batch_size: int
    gradient_accumulation_steps: int
    world_size: int
    gradient_checkpointing: bool = False
    snapshot: bool = True
    strategy: str = REPLICATED
    offload: str = "none"

    @property
    def global_batch_size(self) -> int:
        return self.micro_batch_size * self.gradient_accumulation_steps * self.world_size

    @property
    def fields(self) -> Mapping[str, Any]:
        """The configuration fields that the plan sets."""
        alone = self.world_size == 1 and self.strategy == REPLICATED
        return {
            "compute.strategy": "single" if alone else self.strategy,
            "compute.offload": self.offload,
            "training.gradient_checkpointing": self.gradient_checkpointing,
            "training.micro_batch_size": self.micro_batch_size,
        }

    def within(
        self,
        micro_batch_size: int,
        *,
        gradient_checkpointing: bool = False,
        snapshot: bool = True,
        strategy: str = "",
        offload: str = "none",
    ) -> BatchPlan:
        """Return the same global batch with no more memory than the given limits need.

        The micro-batch gets smaller, or less is kept in memory.

        Args:
            strategy: replaces this one; "" keeps it.
        """
        share = self.micro_batch_size * self.gradient_accumulation_steps
        micro = _largest_divisor(share, min(micro_batch_size, self.micro_batch_size))
        return replace(
            self,
            micro_batch_size=micro,
            gradient_accumulation_steps=share // micro,
            gradient_checkpointing=self.gradient_checkpointing or gradient_checkpointing,
            snapshot=self.snapshot and snapshot,
            strategy=strategy or self.strategy,
            offload=self.offload if offload == "none" else offload,
        )

    def __str__(self) -> str:
        parts = [f"{self.micro_batch_size} x {self.gradient_accumulation_steps}"]
        parts += ["activation checkpointing"] if self.gradient_checkpointing else []
        parts += [] if self.snapshot else ["no snapshot in host memory"]
        parts += [] if self.strategy == REPLICATED else [self.strategy]
        parts += [] if self.offload == "none" else [f"offload {self.offload}"]
        return ", ".join(parts)


def plan_batch(
    global_batch_size: int,
    world_size: int,
    micro: int | None = None,
    *,
    limit: int = LARGEST_DERIVED,
) -> BatchPlan:
    """Return the micro-batch and accumulation of each rank.

    Args:
        micro: sequences per forward pass; None means the largest divisor of the rank's share up to
            `limit`.

    Raises:
        BadInput: the global batch can't be split into equal parts that way.
    """
    if global_batch_size % world_size:
        raise BadInput(
            f"training.global_batch_size = {global_batch_size} is not divisible by "
            f"{world_size} ranks",
            remedy=f"set a multiple of {world_size}, or change compute.nproc_per_node and "
            "compute.nodes",
        )
    share = global_batch_size // world_size
    if micro is None:
        micro = _largest_divisor(share, limit)
    elif share % micro:
        raise BadInput(
            f"training.micro_batch_size = {micro} does not divide the {share} sequences that "
            "each rank has in a global batch",
            remedy=f"set a divisor of {share}, or leave it out",
        )
    return BatchPlan(micro, share // micro, world_size)


def batch_at(step: int, skipped: Sequence[int]) -> int:
    """Return the position of the global batch that is used after `step` steps.

    Args:
        skipped: skipped global batches, ascending.
    """
    place = step
    for batch in skipped:
        if batch <= place:
            place += 1
    return place


def _largest_divisor(share: int, most: int) -> int:
    return next(size for size in range(most, 0, -1) if share % size == 0)

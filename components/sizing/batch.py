"""From the global batch, which affects what the model learns, to the work of each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from steadytrain.components.shared.batch import REPLICATED, BatchSettings
from steadytrain.components.shared.errors import BadInput

LARGEST_DERIVED = 8
"""Maximum sequences of a derived micro-batch; a planner that knows the memory may exceed it."""


@dataclass(frozen=True)
class BatchPlan:
    """How a global batch is processed: micro-batch x accumulation x world size."""

    settings: BatchSettings
    gradient_accumulation_steps: int
    world_size: int

    @property
    def micro_batch_size(self) -> int:
        return self.settings.micro_batch_size

    @property
    def global_batch_size(self) -> int:
        return self.micro_batch_size * self.gradient_accumulation_steps * self.world_size

    @property
    def fields(self) -> Mapping[str, Any]:
        """The configuration fields that the plan sets."""
        own = self.settings
        return {
            "compute.strategy": own.strategy_on(self.world_size),
            "compute.offload": own.offload,
            "training.gradient_checkpointing": own.gradient_checkpointing,
            "training.micro_batch_size": own.micro_batch_size,
        }

    def limited_to(self, limit: BatchSettings) -> BatchPlan:
        """Return the same global batch with no more memory than the limit needs.

        The micro-batch gets smaller, or less is kept in memory.
        """
        own, share = self.settings, self.micro_batch_size * self.gradient_accumulation_steps
        micro = _largest_divisor(share, min(limit.micro_batch_size, own.micro_batch_size))
        settings = BatchSettings(
            micro,
            gradient_checkpointing=own.gradient_checkpointing or limit.gradient_checkpointing,
            snapshot=own.snapshot and limit.snapshot,
            strategy=limit.strategy or own.strategy,
            offload=own.offload if limit.offload == "none" else limit.offload,
        )
        return BatchPlan(settings, share // micro, self.world_size)

    def changed(self, **settings: Any) -> BatchPlan:
        """Return the plan with other settings than the micro-batch."""
        return replace(self, settings=replace(self.settings, **settings))

    def __str__(self) -> str:
        own = self.settings
        parts = [f"{own.micro_batch_size} x {self.gradient_accumulation_steps}"]
        parts += ["activation checkpointing"] if own.gradient_checkpointing else []
        parts += [] if own.snapshot else ["no snapshot in host memory"]
        parts += [] if own.strategy == REPLICATED else [own.strategy]
        parts += [] if own.offload == "none" else [f"offload {own.offload}"]
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
    return BatchPlan(BatchSettings(micro), share // micro, world_size)


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

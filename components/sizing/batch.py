"""From the global batch, which affects what the model learns, to the work of each rank.

Commands import this module for their help, so it must be quick.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

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
        settings = self.settings
        length = (
            {"data.sequence_length": settings.sequence_length} if settings.sequence_length else {}
        )
        return {
            "compute.strategy": settings.strategy_on(self.world_size),
            "compute.offload": settings.offload,
            "training.gradient_checkpointing": settings.gradient_checkpointing,
            "training.micro_batch_size": settings.micro_batch_size,
            **length,
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
            sequence_length=limit.sequence_length or own.sequence_length,
        )
        return BatchPlan(settings, share // micro, self.world_size)

    def changed(self, **settings: Any) -> BatchPlan:
        """Return the plan with other settings than the micro-batch."""
        return replace(self, settings=replace(self.settings, **settings))

    def __str__(self) -> str:
        settings = self.settings
        parts = [f"{settings.micro_batch_size} x {self.gradient_accumulation_steps}"]
        parts += ["activation checkpointing"] if settings.gradient_checkpointing else []
        parts += [] if settings.snapshot else ["no snapshot in host memory"]
        parts += [] if settings.strategy == REPLICATED else [settings.strategy]
        parts += [] if settings.offload == "none" else [f"offload {settings.offload}"]
        parts += (
            [f"at most {settings.sequence_length:,} tokens"] if settings.sequence_length else []
        )
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
    count = step
    for batch in skipped:
        if batch <= count:
            count += 1
    return count


def _largest_divisor(share: int, most: int) -> int:
    return next(size for size in range(most, 0, -1) if share % size == 0)


IN_A_NODE: Final = 8
"""GPUs of a full node."""
MOST_GPUS: Final = 128
"""The most GPUs that a plan considers."""


def nodes_for(gpus: int) -> tuple[int, int]:
    """Return the nodes for a number of GPUs, and the GPUs of each; zeros for 0.

    Raises:
        BadInput: they do not fill nodes of 8.
    """
    if gpus <= IN_A_NODE:
        return (1, gpus) if gpus else (0, 0)
    if gpus % IN_A_NODE:
        raise BadInput(
            f"--gpu-count {gpus}: above {IN_A_NODE}, GPUs are in nodes of {IN_A_NODE}",
            remedy=f"give a multiple of {IN_A_NODE}, or set compute.nodes and "
            "compute.nproc_per_node",
        )
    return gpus // IN_A_NODE, IN_A_NODE

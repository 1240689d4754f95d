"""This rank's share of a global batch, as tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from steadytrain.components.sizing.batch import batch_at
from steadytrain.components.tasks.base import Batch
from steadytrain.components.train.loop.data import drawn, micro_batches, share
from steadytrain.components.train.loop.setup import Parts


@dataclass(frozen=True)
class RankBatches:
    """This rank's share of a global batch.

    weight: number of targets in its micro-batches.
    tokens: cost of its rows, in the task's units.
    places: number of tokens in its micro-batches, including padding.
    waited: seconds that the loop waited for this share.
    """

    batches: list[Batch]
    weight: int
    tokens: int
    places: int
    waited: float = 0.0


def take_share(parts: Parts, step: int) -> RankBatches:
    """Return this rank's micro-batches of the global batch of `step`, on the CPU."""
    size = parts.config.training.global_batch_size
    position = batch_at(step, parts.skipped_batches) * size
    indices = share(parts.order.take(position, size), parts.rank, parts.world_size)
    own = share(range(position, position + size), parts.rank, parts.world_size)
    rows = [
        drawn(parts.task, parts.train[index], place, training=True)
        for index, place in zip(indices, own, strict=True)
    ]
    if (cut := parts.sequences) is not None:
        rows = [cut.cut(row, place) for row, place in zip(rows, own, strict=True)]
    micro = parts.batch.micro_batch_size
    batches = [parts.task.collate(part) for part in micro_batches(rows, micro)]
    weight = sum(map(parts.task.weight, batches))
    tokens = sum(map(parts.task.cost, rows))
    padded = getattr(parts.task, "padded", "")
    places = sum(batch[padded].numel() for batch in batches) if padded else tokens
    return RankBatches(batches, weight, tokens, places)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return the batch with its tensors on the device. Other values stay the same."""
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }

"""This rank's share of a global batch, as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from steadytrain.components.sizing.batch import batch_at
from steadytrain.components.tasks.base import Batch, Row
from steadytrain.components.techniques.mixup.mixing import PARTNER, SHARE
from steadytrain.components.train.loop.data import drawn, micro_batches, share
from steadytrain.components.train.loop.setup import Parts

# Which row of a global batch each row is mixed with, and how (`training.mixup`).
#
# Partners and shares depend on the seed and on the number of the global batch alone. So a resumed
# run, another world size and a smaller micro-batch mix the same rows.

_STREAM: Final = 0x6D697875
"""Keeps the draws apart from those of the order, which also begin with the seed."""


@dataclass(frozen=True)
class Partners:
    """The mixtures of a global batch.

    places: of the partner of each row, within the batch. It may be the row itself.
    shares: of each row in its mixture, from 0 to 1. The rest is its partner's.
    """

    places: Sequence[int]
    shares: Sequence[float]


def partners_of(batch: int, size: int, *, alpha: float, seed: int) -> Partners:
    """Return the mixtures of a global batch: a permutation, and shares from Beta(alpha, alpha).

    Args:
        batch: number of the global batch in the order.
        size: rows in it.
    """
    random = np.random.default_rng([seed, _STREAM, batch])
    places: list[int] = random.permutation(size).tolist()
    shares: list[float] = random.beta(alpha, alpha, size).tolist()
    return Partners(places, shares)


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
    training = parts.config.training
    size, mixup = training.global_batch_size, training.mixup
    number = batch_at(step, parts.skipped_batches)
    indices = parts.order.take(number * size, size)

    def row_at(place: int) -> Row:
        """Return the row at a place of the global batch."""
        at, cut = number * size + place, parts.sequences
        row = drawn(parts.task, parts.train[indices[place]], at, training=True)
        return row if cut is None else cut.cut(row, at)

    own = share(range(size), parts.rank, parts.world_size)
    rows = [row_at(place) for place in own]
    if mixup.on:
        mixed = partners_of(number, size, alpha=mixup.alpha, seed=training.seed)
        others = [row_at(mixed.places[place]) for place in own]
        shares = [mixed.shares[place] for place in own]
        rows = [
            {**row, PARTNER: other, SHARE: part}
            for row, other, part in zip(rows, others, shares, strict=True)
        ]
    elif hasattr(parts.task, "measure"):
        rows = [
            {**row, PARTNER: row_at((place - 1) % size)}
            for row, place in zip(rows, own, strict=True)
        ]
    micro = parts.batch.micro_batch_size
    batches = [parts.task.collate(part) for part in micro_batches(rows, micro)]
    weight = sum(map(parts.task.weight, batches))
    tokens = sum(map(parts.task.cost, rows))
    padded = getattr(parts.task, "padded", "")
    places = sum(batch[padded].numel() for batch in batches) if padded else tokens
    return RankBatches(batches, weight, tokens, places)

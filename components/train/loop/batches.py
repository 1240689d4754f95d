"""This rank's share of a global batch, as tensors, which a thread prepares while a step computes.

The rows of a step depend only on its number, so prefetching changes neither the order nor what a
resumed run sees. At most `training.prefetch_batches` shares exist besides the one in use. Its rows
are read and changed by `training.loader_workers` threads.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch

from steadytrain.components.sizing.batch import batch_at
from steadytrain.components.tasks.base import Batch, Row, load_task
from steadytrain.components.techniques.mixup.mixing import CENTER, PARTNER, SHARE
from steadytrain.components.techniques.modules import to_device
from steadytrain.components.train.loop.data import drawn, share
from steadytrain.components.train.loop.setup import TrainingSetup
from steadytrain.components.train.loop.shortening import cut_places, shortened, without_targets

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
    centers: of the rectangle that is its partner's, as `mixing.CENTER`; empty without rectangles.
    """

    places: Sequence[int]
    shares: Sequence[float]
    centers: Sequence[tuple[float, float] | None] = ()


def partners_of(batch: int, size: int, *, alpha: float, seed: int, cutmix: float = 0.0) -> Partners:
    """Return the mixtures of a global batch: a permutation, and shares from Beta(alpha, alpha).

    Args:
        batch: number of the global batch in the order.
        size: rows in it.
        cutmix: shares are from Beta(cutmix, cutmix) for rows with a rectangle of their partner. Of
            both kinds, there are as many.
    """
    random = np.random.default_rng([seed, _STREAM, batch])
    places: list[int] = random.permutation(size).tolist()
    shares = random.beta(alpha, alpha, size) if alpha else np.zeros(size)
    if not cutmix:
        return Partners(places, shares.tolist())
    cut = random.random(size) < (0.5 if alpha else 1.0)
    shares = np.where(cut, random.beta(cutmix, cutmix, size), shares)
    centers = random.random((size, 2)).tolist()
    partners = [
        (down, right) if own else None for (down, right), own in zip(centers, cut, strict=True)
    ]
    return Partners(places, shares.tolist(), partners)


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


EachRow = Callable[[Callable[[int], Row], Iterable[int]], Iterable[Row]]
"""Calls a function with each position, and yields the rows in the order of the positions."""


def take_share(parts: TrainingSetup, step: int, each: EachRow = map) -> RankBatches:
    """Return this rank's micro-batches of the global batch of `step`, on the CPU."""
    training = parts.config.training
    size, mixup = training.global_batch_size, training.mixup
    number = batch_at(step, parts.skipped_batches)
    indices = parts.order.take(number * size, size)

    def row_at(position: int) -> Row:
        """Return the row at a position of the global batch."""
        at, cut = number * size + position, parts.sequences
        row = drawn(parts.task, parts.train[indices[position]], at, training=True)
        return row if cut is None else cut.cut(row, at)

    own = share(range(size), parts.rank, parts.world_size)
    rows = [*each(row_at, own)]
    if mixup.on:
        mixed = partners_of(
            number, size, alpha=mixup.alpha, seed=training.seed, cutmix=mixup.cutmix
        )
        others = each(row_at, [mixed.places[position] for position in own])
        shares = [mixed.shares[position] for position in own]
        rows = [
            {**row, PARTNER: other, SHARE: part}
            for row, other, part in zip(rows, others, shares, strict=True)
        ]
        if mixed.centers:
            rows = [
                {**row, CENTER: mixed.centers[position]}
                for row, position in zip(rows, own, strict=True)
            ]
    elif hasattr(parts.task, "measure"):
        others = each(row_at, [(position - 1) % size for position in own])
        rows = [{**row, PARTNER: other} for row, other in zip(rows, others, strict=True)]
    missing = 0
    if parts.batch.sequence_length:
        rows, missing = _cut(parts, rows, row_at)
    micro = parts.batch.micro_batch_size
    starts = range(0, len(rows), micro)
    batches = [parts.task.collate(rows[start : start + micro]) for start in starts]
    batches += [parts.task.collate([without_targets(rows[0])]) for _ in range(missing)]
    weight = sum(map(parts.task.weight, batches))
    tokens = sum(map(parts.task.cost, rows))
    padded = getattr(parts.task, "padded", "")
    places = sum(batch[padded].numel() for batch in batches) if padded else tokens
    return RankBatches(batches, weight, tokens, places)


def _cut(
    parts: TrainingSetup, rows: Sequence[Row], row_at: Callable[[int], Row]
) -> tuple[list[Row], int]:
    """Return a rank's rows as short sequences, and how many micro-batches others have more.

    With sharded weights, each pass needs all ranks. So all of them compute the same number.

    Args:
        row_at: returns the row at a position of the global batch.
    """
    batch, ranks = parts.batch, parts.world_size
    longest, cuttable = batch.sequence_length, load_task(parts.config.data.task).cuttable

    def passes(each: Iterable[Row]) -> int:
        counts = (len(cut_places(row["lengths"], longest, cuttable=cuttable)) for row in each)
        return math.ceil(sum(counts) / batch.micro_batch_size)

    short = [one for row in rows for one in shortened(row, longest, cuttable=cuttable)]
    places = range(parts.config.training.global_batch_size)
    others = (map(row_at, share(places, rank, ranks)) for rank in range(ranks) if ranks > 1)
    return short, max(map(passes, others), default=passes(rows)) - passes(rows)


class Prefetch:
    """Provides shares of global batches on the device, fetched some steps ahead. Close it."""

    def __init__(self, parts: TrainingSetup) -> None:
        self.parts = parts
        self._thread = ThreadPoolExecutor(1, "prefetch")
        workers = parts.config.training.loader_workers
        self._workers = ThreadPoolExecutor(workers, "loader") if workers > 1 else None
        self._ahead: dict[int, Future[RankBatches]] = {}
        device = parts.accelerator.device
        # Copies on a separate stream do not wait for the step that is computing.
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """End the threads after their current tasks."""
        self._thread.shutdown(cancel_futures=True)
        if self._workers is not None:
            self._workers.shutdown()

    def take(self, step: int) -> RankBatches:
        """Return this rank's share of the global batch of `step`.

        Raises:
            Whatever reading or collating this batch raised, never an error from a later batch.
        """
        began = time.monotonic()
        batch = self._fetching(step).result()
        end = min(step + 1 + self.parts.config.training.prefetch_batches, self.parts.steps)
        self._ahead = {later: self._fetching(later) for later in range(step + 1, end)}
        return replace(batch, waited=time.monotonic() - began)

    def forget(self) -> None:
        """Fetch again what was fetched ahead: micro-batches have another size from now on."""
        for fetched in self._ahead.values():
            fetched.cancel()
        self._ahead = {}

    def _fetching(self, step: int) -> Future[RankBatches]:
        future = self._ahead.get(step)
        return self._thread.submit(self._fetch, step) if future is None else future

    def _fetch(self, step: int) -> RankBatches:
        work = take_share(self.parts, step, self._workers.map if self._workers else map)
        return replace(work, batches=self._transfer(work.batches))

    def _transfer(self, batches: list[Batch]) -> list[Batch]:
        if self._stream is None:
            return batches
        device = self._stream.device
        pinned = [{name: _pinned(value) for name, value in batch.items()} for batch in batches]
        with torch.cuda.stream(self._stream):
            moved = [to_device(batch, device) for batch in pinned]
        self._stream.synchronize()
        for batch in moved:
            for value in batch.values():
                if isinstance(value, torch.Tensor):
                    # Otherwise, its memory could be reused while the step still reads it.
                    value.record_stream(torch.cuda.default_stream(device))
        return moved


def _pinned(value: object) -> object:
    return value.pin_memory() if isinstance(value, torch.Tensor) else value

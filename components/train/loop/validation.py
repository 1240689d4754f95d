"""Scores on the validation data, over all ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from accelerate.utils import gather_object

from steadytrain.components.shared.errors import BadInput
from steadytrain.components.train.loop.batches import to_device
from steadytrain.components.train.loop.data import share
from steadytrain.components.train.loop.setup import Parts


@torch.no_grad()
def validate(parts: Parts) -> dict[str, float]:
    """Return the task's metrics over all validation data. They are equal on all ranks."""
    # Don't use the wrapped model: ranks may have different numbers of batches.
    parts.module.eval()
    mine = share(range(len(parts.validation)), parts.rank, parts.world_size)
    sums: Counter[str] = Counter()
    for start in range(0, len(mine), parts.batch.micro_batch_size):
        sums.update(_sums(parts, mine[start : start + parts.batch.micro_batch_size]))
    if parts.strategy.shares_weights:
        _keep_up(parts, len(mine))
    total: Counter[str] = Counter()
    for own in gather_object([dict(sums)]):
        total.update(own)
    return parts.task.validation_metrics(total)


def _sums(parts: Parts, rows: Sequence[int]) -> Mapping[str, float]:
    parts.beat("validate")
    batch = parts.task.collate([parts.validation[index] for index in rows])
    return parts.task.validate(parts.module, to_device(batch, parts.accelerator.device))


def _keep_up(parts: Parts, own: int) -> None:
    """Run extra forward passes while other ranks validate: with shards, each pass needs all ranks.

    Args:
        own: number of rows that this rank has validated.
    """
    most = math.ceil(len(parts.validation) / parts.world_size)
    micro = parts.batch.micro_batch_size
    for _ in range(math.ceil(own / micro), math.ceil(most / micro)):
        _sums(parts, [0])


@torch.no_grad()
def best_by(parts: Parts) -> tuple[str, bool]:
    """Return the metric that selects the best model, and whether a higher value is better.

    Raises:
        BadInput: the task has no such metric, or its direction is unknown.
    """
    training, task = parts.config.training, parts.task
    metric = (training.metric_for_best_model or task.metric).removeprefix("eval_")
    if metric == task.metric:
        given = training.greater_is_better
        return metric, task.greater_is_better if given is None else given
    known = _metric_names(parts)
    if metric not in known:
        raise BadInput(
            f"training.metric_for_best_model = {metric!r}: the task has no such metric",
            remedy=f"one of {', '.join(known)}",
        )
    if training.greater_is_better is None:
        raise BadInput(
            f"training.metric_for_best_model = {metric!r}: whether more of it is better is not "
            "known",
            remedy="set training.greater_is_better too",
        )
    return metric, training.greater_is_better


def _metric_names(parts: Parts) -> list[str]:
    """Get the names from the task, using a single row, so mistakes show before the first step."""
    parts.module.eval()
    batch = to_device(parts.task.collate([parts.train[0]]), parts.accelerator.device)
    return list(parts.task.validation_metrics(parts.task.validate(parts.module, batch)))

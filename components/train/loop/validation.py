"""Scores on the validation data, over all ranks, of the weights that the optimizer exports."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from steadytrain.components.shared.config import TrainingConfig
from steadytrain.components.shared.config.optimizers import OptimizerSpec
from steadytrain.components.tasks.base import load_task
from steadytrain.components.techniques.modules import to_device
from steadytrain.components.train.checkpoint import CheckpointStore
from steadytrain.components.train.checkpoint.state import by_parameter
from steadytrain.components.train.loop.data import drawn, share
from steadytrain.components.train.loop.exchange import gather_objects
from steadytrain.components.train.loop.progress import best_metric
from steadytrain.components.train.loop.setup import TrainingSetup
from steadytrain.components.train.strategy.base import Strategy


@torch.no_grad()
def validate(parts: TrainingSetup) -> dict[str, float]:
    """Return the task's metrics over all validation data. They are equal on all ranks."""
    # Don't use the wrapped model: ranks may have different numbers of batches.
    parts.module.eval()
    micro, rows = parts.batch.micro_batch_size, range(len(parts.validation))
    # Ranks share whole micro-batches: a loss that compares their rows depends on which these are.
    batches = [rows[start : start + micro] for start in rows[::micro]]
    mine = share(range(len(batches)), parts.rank, parts.world_size)
    sums: Counter[str] = Counter()
    for number in mine:
        sums.update(_sums(parts, batches[number]))
    if parts.strategy.shares_weights:
        _run_extra_passes(parts, math.ceil(len(batches) / parts.world_size) - len(mine))
    total: Counter[str] = Counter()
    for of_rank in gather_objects([dict(sums)], parts.meet):
        total.update(of_rank)
    return parts.task.validation_metrics(total)


def _sums(parts: TrainingSetup, rows: Sequence[int]) -> Mapping[str, float]:
    parts.beat("validate")
    batch = parts.task.collate(
        [drawn(parts.task, parts.validation[index], index, training=False) for index in rows]
    )
    return parts.task.validate(parts.module, to_device(batch, parts.accelerator.device))


def _run_extra_passes(parts: TrainingSetup, missing: int) -> None:
    """Run extra forward passes while other ranks validate: with shards, each pass needs all ranks.

    Args:
        missing: micro-batches that this rank has validated less than others.
    """
    for _ in range(missing):
        _sums(parts, [0])


@torch.no_grad()
def best_by(parts: TrainingSetup) -> tuple[str, bool]:
    """Return the metric that selects the best model, and whether a higher value is better.

    Raises:
        BadInput: the task has no such metric, or its direction is unknown.
    """
    return best_metric(parts.config.training, parts.task, partial(_metric_names, parts))


def _metric_names(parts: TrainingSetup) -> Sequence[str]:
    """Get the names from the task, using a single row, so mistakes show before the first step."""
    declared = load_task(parts.config.data.task).metrics(parts.config)
    if declared is not None:
        return declared
    parts.module.eval()
    row = drawn(parts.task, parts.train[0], 0, training=True)
    batch = to_device(parts.task.collate([row]), parts.accelerator.device)
    return list(parts.task.validation_metrics(parts.task.validate(parts.module, batch)))


@torch.no_grad()
def evaluated_weights(strategy: Strategy, training: TrainingConfig) -> AbstractContextManager[None]:
    """Return a context in which the model has the weights to evaluate.

    Training then continues with exactly the weights from before. The context needs memory for one
    copy of the weights, when there are no gradients.
    """
    spec, weights = strategy.optimizer_spec, strategy.weights()
    if spec.evaluated is None:
        return nullcontext()
    state: dict[str, dict[str, torch.Tensor]] = {}
    for key in (tensor.name for tensor in spec.tensors if tensor.same_shape):
        for name, tensor in strategy.moments(key).items():
            state.setdefault(name, {})[key] = tensor
    return strategy.exchanged(
        {name: spec.evaluated(weights[name], state[name], training) for name in state}
    )


def saved_state(
    spec: OptimizerSpec, store: CheckpointStore, step: int
) -> Mapping[str, Mapping[str, torch.Tensor]]:
    """Return the optimizer's state that the exported weights of a step are computed from.

    Returns:
        By the weight's name, and key. Empty if the weights are exported as they were trained.

    Raises:
        CheckpointDamaged: there is no such checkpoint, or it differs from what was written.
    """
    return {} if spec.evaluated is None else by_parameter(store.load(step, "optimizer"))


def exported_weights(
    spec: OptimizerSpec,
    training: TrainingConfig,
    module: torch.nn.Module,
    saved: Mapping[str, Mapping[str, torch.Tensor]],
) -> Mapping[str, torch.Tensor]:
    """Return the complete weights that replace those of a step in the exported model, by name.

    Args:
        module: has the trained weights of that step.
        saved: the `saved_state` of that step.
    """
    if spec.evaluated is None:
        return {}
    trained = dict(module.named_parameters())
    return {
        name: spec.evaluated(
            trained[name].detach(),
            # Tensors from DeepSpeed's flat shards have lost their shape.
            {key: item.view(trained[name].shape) for key, item in state.items() if item.dim()},
            training,
        )
        for name, state in saved.items()
    }

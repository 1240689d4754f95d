"""The weights to validate and export if an optimizer trains others (`OptimizerSpec.evaluated`)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch

from steadytrain.components.shared.config import TrainingConfig
from steadytrain.components.shared.config.optimizers import OptimizerSpec
from steadytrain.components.train.checkpoint import CheckpointStore
from steadytrain.components.train.checkpoint.state import by_parameter
from steadytrain.components.train.strategy.base import Strategy


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

"""The network of PyTorch as a member of an ensemble: steps of PyTorch's loop, one by one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from steadytrain.components.series.model import NetworkModel
from steadytrain.components.series.training import Forecasting, written
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.sizing.batch import plan_batch
from steadytrain.components.sizing.recipe import learning_rate
from steadytrain.components.tasks.base import Row
from steadytrain.components.tasks.frozen_parts import parameter_count
from steadytrain.components.techniques.modules import to_device
from steadytrain.components.train.framework import Learned
from steadytrain.components.train.framework.learner import State
from steadytrain.components.train.loop.batches import take_share
from steadytrain.components.train.loop.optim import set_rate
from steadytrain.components.train.loop.setup import TrainingSetup, build_module, set_up
from steadytrain.components.train.loop.steps import take_step


class NetworkMember:
    """Learns as a run of the network alone does, to the same weights.

    Its state are its weights: a member that is not trained begins again.
    """

    def __init__(self, config: RunConfig, data: DataRecord) -> None:
        self.config, self.data = config, data
        self.task: Any = Forecasting(config, data)
        self.steps = 0

    @cached_property
    def module(self) -> torch.nn.Module:
        return build_module(self.config, self.task)

    @cached_property
    def setup(self) -> TrainingSetup:
        """What the loop trains with."""
        training = self.config.training
        planned = plan_batch(training.global_batch_size, 1, training.micro_batch_size)
        result = set_up(self.config, self.data, planned.settings)
        self.module = result.module
        return result

    @property
    def parameters(self) -> int:
        return parameter_count(self.module)

    def learn(self, rows: Sequence[Row], *, learning_rate_scale: float) -> Learned:
        del rows
        setup = self.setup
        set_rate(setup.scheduler, learning_rate(setup.recipe) * learning_rate_scale)
        work = take_share(setup, self.steps)
        batches = [to_device(batch, setup.accelerator.device) for batch in work.batches]
        weight = max(1, work.weight)
        result = take_step(
            setup,
            self.steps,
            batches,
            weight,
            limit=math.inf,
            after_backward=_nothing,
            before_update=_nothing,
        )
        self.steps += 1
        return Learned(result.loss / weight, result.learning_rate, result.grad_norm)

    def state(self) -> State:
        return written(self.task, self.module).weights

    def restore(self, state: State) -> None:
        weights = {name: torch.from_numpy(value) for name, value in state.items()}
        self.module.load_state_dict(weights)

    def learned_model(self) -> NetworkModel:
        """Return what has been learned so far, without PyTorch."""
        return written(self.task, self.module)


def _nothing(_: Any) -> None: ...

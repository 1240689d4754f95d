"""Averages of the weights: exponential (EMA), or plain (SWA), as in torch.optim.swa_utils."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from steadytrain.components.techniques.averaging import AveragingConfig
from steadytrain.components.techniques.base import (
    TrainingComponent,
    TrainingContext,
    Update,
)

AVERAGE = "average"
"""Name of the tensors."""


class WeightAverage(TrainingComponent):
    """Averages the weights after updates. It changes nothing that is learned.

    EMA: Polyak and Juditsky 1992. SWA: Izmailov et al. 2018.

    Args:
        start: number of steps before the first one that is averaged.
    """

    def __init__(self, config: AveragingConfig, start: int) -> None:
        self.config, self.start = config, start
        self.count = 0

    def begin(self, context: TrainingContext) -> None:
        self._weights = context.weights
        self._average = {name: weight.clone() for name, weight in context.weights.items()}

    @torch.no_grad()
    def after_update(self, update: Update) -> None:
        past = update.step - self.start
        if past <= 0 or past % self.config.every:
            return
        names = list(self._average)
        average = [self._average[name] for name in names]
        weights = [self._weights[name] for name in names]
        if self.count and names:
            self._function()(average, weights, self.count)
        else:
            # As in AveragedModel, the first weights are the average.
            for old, new in zip(average, weights, strict=True):
                old.copy_(new)
        self.count += 1

    def _function(self) -> Callable[..., None]:
        if self.config.kind == "swa":
            return get_swa_multi_avg_fn()  # type: ignore[no-any-return, no-untyped-call]
        warm = (1 + self.count) / (10 + self.count)
        decay = min(self.config.decay, warm) if self.config.warmup else self.config.decay
        return get_ema_multi_avg_fn(decay)  # type: ignore[no-any-return, no-untyped-call]

    def tensors(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        return {AVERAGE: self._average}

    def state_dict(self) -> Mapping[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]

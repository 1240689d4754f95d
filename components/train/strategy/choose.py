"""Which strategy a configuration asks for."""

from __future__ import annotations

import math

import torch
from accelerate import Accelerator

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.train.strategy.base import Strategy
from steadytrain.components.train.strategy.replicated import MakeOptimizer, Replicated


def apply_strategy(
    config: RunConfig,
    accelerator: Accelerator,
    module: torch.nn.Module,
    make_optimizer: MakeOptimizer,
    *,
    strategy: str,
    offload: str = "none",
) -> Strategy:
    """The model and its optimizer on this world's ranks.

    Args:
        make_optimizer: of the model as it is then on this rank.
        strategy, offload: as in `compute`, but never "auto".
    """
    training = config.training
    if strategy == "fsdp":
        from steadytrain.components.train.strategy.fully_sharded import FullySharded

        return FullySharded(
            accelerator, module, make_optimizer, bf16=training.bf16, offload=offload == "all"
        )
    if strategy.startswith("zero"):
        from steadytrain.components.train.strategy.zero import Zero

        return Zero(
            accelerator,
            module,
            make_optimizer,
            stage=int(strategy.removeprefix("zero")),
            limit=training.max_grad_norm or math.inf,
            bf16=training.bf16,
            offload=offload,
        )
    return Replicated(accelerator, module, make_optimizer)

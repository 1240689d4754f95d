"""Choose the strategy that a configuration asks for."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from accelerate import Accelerator

from steadytrain.components.shared.batch import REPLICATED
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
    """Set up the model and its optimizer on this world's ranks.

    A single rank has nobody to share with, so it is replicated, unless part of the state is
    offloaded to host memory.

    Args:
        make_optimizer: creates the optimizer from the model in its final form on this rank.
        strategy, offload: as in `compute`, but never "auto".
    """
    training, alone = config.training, accelerator.num_processes == 1
    if strategy == REPLICATED or (alone and offload == "none"):
        return Replicated(accelerator, module, make_optimizer)
    if alone:
        _join_a_group_of_one()
    if strategy == "fsdp":
        from steadytrain.components.train.strategy.fully_sharded import FullySharded

        return FullySharded(
            accelerator, module, make_optimizer, bf16=training.bf16, offload=offload == "all"
        )
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


def _join_a_group_of_one() -> None:
    """Create a process group of one rank: sharding needs it, and accelerate does not create it."""
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("cuda:nccl,cpu:gloo", store=store, rank=0, world_size=1)

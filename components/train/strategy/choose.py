"""Which strategy a configuration asks for."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from accelerate import Accelerator

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.train.plan.batch import REPLICATED
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

    A rank alone has nobody to share with, and is replicated, but where the host's memory takes
    a part.

    Args:
        make_optimizer: of the model as it is then on this rank.
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
    """Which accelerate does not make of a rank alone, and sharding cannot do without."""
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("cuda:nccl,cpu:gloo", store=store, rank=0, world_size=1)

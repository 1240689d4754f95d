"""Set up the strategy that a configuration asks for."""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from accelerate import Accelerator

from steadytrain.components.shared.batch import REPLICATED
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.strategies import Offload, strategy_spec
from steadytrain.components.train.strategy.base import MakeOptimizer, Strategy


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
    alone = accelerator.num_processes == 1
    spec = strategy_spec(REPLICATED if alone and offload == "none" else strategy)
    if alone and spec.shards:
        _join_a_group_of_one()
    applied = cast(
        Strategy,
        spec.build(config, accelerator, module, make_optimizer, offload=cast(Offload, offload)),
    )
    applied.spec = spec
    return applied


def _join_a_group_of_one() -> None:
    """Create a process group of one rank: sharding needs it, and accelerate does not create it."""
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("cuda:nccl,cpu:gloo", store=store, rank=0, world_size=1)

"""Optimizer, gradients, weights in shards, one more with each stage: DeepSpeed's ZeRO.

Not by accelerate, which knows DeepSpeed on accelerators alone: what runs on GPUs would not be
what is tested on a CPU.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from accelerate import Accelerator

from steadytrain.components.train.checkpoint import Checkpoint
from steadytrain.components.train.checkpoint.region import Region, whole
from steadytrain.components.train.checkpoint.snapshot import Piece, whole_piece
from steadytrain.components.train.checkpoint.state import model_tensors
from steadytrain.components.train.strategy.base import MOMENTS, Strategy, restore_groups
from steadytrain.components.train.strategy.replicated import MakeOptimizer
from steadytrain.components.train.strategy.zero_config import zero_config
from steadytrain.components.train.strategy.zero_shards import Shard, shards_of, spread_weights

_OWN_KERNEL: Final = "deepspeed_shm_comm"


def _deepspeed(*, on_cpu: bool) -> Any:
    """DeepSpeed; on a CPU without its own kernel for ranks of one machine, in whose place gloo
    does: it would be compiled first, for a minute and by a compiler that images do not have.
    """
    if on_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    if on_cpu:
        deepspeed.ops.__compatible_ops__[_OWN_KERNEL] = False
    return deepspeed


class Zero(Strategy):
    """A DeepSpeed engine of stage 1, 2 or 3 over the loop's own optimizer.

    Args:
        stage: 1: the optimizer's state is cut into shards; 2: gradients too; 3: weights too.
        limit: largest norm of the gradients; the engine clips them itself.
        bf16: whether it computes in bfloat16; the optimizer's weights stay float32.
        offload: as `compute.offload` has it.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        module: torch.nn.Module,
        make_optimizer: MakeOptimizer,
        *,
        stage: int,
        limit: float,
        bf16: bool = False,
        offload: str = "none",
    ) -> None:
        deepspeed = _deepspeed(on_cpu=accelerator.device.type == "cpu")
        self.accelerator, self.module, self.stage = accelerator, module, stage
        self.shares_weights = stage == 3  # type: ignore[misc]
        self.optimizer = make_optimizer(module)
        config = zero_config(
            stage=stage,
            limit=limit,
            bf16=bf16,
            offload=offload,
            parameters=sum(item.numel() for item in module.parameters()),
            trained=sum(item.numel() for item in module.parameters() if item.requires_grad),
        )
        engine, self._zero, _, _ = deepspeed.initialize(
            model=module, optimizer=self.optimizer, config=config, dist_init_required=False
        )
        self.model: Any = engine

    def micro_batch(self, *, last: bool) -> contextlib.AbstractContextManager[Any]:
        self.model.set_gradient_accumulation_boundary(is_boundary=last)
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        self.model.backward(loss)

    def clip(self, limit: float) -> None:
        """The engine clips where it updates."""

    def update(self) -> float:
        self.model.step()
        norm = self.model.get_global_grad_norm()
        return math.nan if norm is None else float(norm)

    def pieces(self) -> Mapping[str, Sequence[Piece]]:
        shards = list(shards_of(self._zero, self.module, self.stage))
        alike = self._alike() if self.accelerator.process_index == 0 else {}
        model = [shard.piece(shard.name, shard.flat) for shard in shards]
        model += [whole_piece(name, tensor) for name, tensor in alike.items()]
        return {"model": model, "optimizer": list(self._optimizer_pieces(shards))}

    def restore(self, checkpoint: Checkpoint, settings: Mapping[str, Any]) -> None:
        shards = list(shards_of(self._zero, self.module, self.stage))
        weights = {shard.name: shard.region(shard.flat) for shard in shards}
        alike = {name: whole(tensor) for name, tensor in self._alike().items()}
        checkpoint.copy_into("model", {**weights, **alike})
        if checkpoint.has("optimizer"):
            checkpoint.copy_into("optimizer", self._moments(shards))
        spread_weights(self._zero, shards, self.stage)
        restore_groups(self.optimizer, settings)

    def _alike(self) -> dict[str, torch.Tensor]:
        """What every rank has whole: weights that are not trained, and buffers."""
        trained = {name for name, item in self.module.named_parameters() if item.requires_grad}
        return {
            name: tensor
            for name, tensor in model_tensors(self.module).items()
            if name not in trained
        }

    def _optimizer_pieces(self, shards: Sequence[Shard]) -> Iterator[Piece]:
        """The number of updates is the same of all parameters, and rank 0 keeps it."""
        first = self.accelerator.process_index == 0
        for shard in shards:
            for key, value in self.optimizer.state.get(shard.flat, {}).items():
                if value.shape == shard.flat.shape:
                    yield shard.piece(f"{shard.name}/{key}", value)
        if first:
            for name, updates in self._updates().items():
                yield whole_piece(f"{name}/step", updates)

    def _updates(self) -> dict[str, torch.Tensor]:
        """By parameter, as a state that is not sharded has them."""
        states = [state for state in self.optimizer.state.values() if "step" in state]
        if not states:
            return {}
        trained = [name for name, item in self.module.named_parameters() if item.requires_grad]
        return {name: states[0]["step"].detach().cpu() for name in trained}

    def _moments(self, shards: Sequence[Shard]) -> dict[str, Region]:
        """Allocates them, as AdamW does at its first step."""
        regions: dict[str, Region] = {}
        for shard in shards:
            state = self.optimizer.state[shard.flat]
            if not state:
                state["step"] = torch.zeros(())
                state.update({key: torch.zeros_like(shard.flat) for key in MOMENTS})
            regions |= {f"{shard.name}/{key}": shard.region(state[key]) for key in MOMENTS}
            regions[f"{shard.name}/step"] = whole(state["step"])
        return regions

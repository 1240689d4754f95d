"""Optimizer, gradients and weights in shards, one more with each stage: DeepSpeed's ZeRO.

It does not use accelerate, which supports DeepSpeed only on accelerators: GPUs would then run
different code from what is tested on a CPU.
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
    """Import DeepSpeed. On a CPU, disable its kernel for ranks on one machine, and use gloo.

    The kernel would have to be compiled first, which takes a minute and a compiler that the images
    do not have.
    """
    if on_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    if on_cpu:
        deepspeed.ops.__compatible_ops__[_OWN_KERNEL] = False
    return deepspeed


class Zero(Strategy):
    """A DeepSpeed engine of stage 1, 2 or 3 around the loop's own optimizer.

    Args:
        stage: 1 shards the optimizer's state, 2 also the gradients, 3 also the weights.
        limit: largest norm of the gradients; the engine clips them itself.
        bf16: whether to compute in bfloat16. The optimizer's weights stay float32.
        offload: as in `compute.offload`.
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
        """Do nothing: the engine clips during the update."""

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
        """Return what every rank has in full: weights that are not trained, and buffers."""
        trained = {name for name, item in self.module.named_parameters() if item.requires_grad}
        return {
            name: tensor
            for name, tensor in model_tensors(self.module).items()
            if name not in trained
        }

    def _optimizer_pieces(self, shards: Sequence[Shard]) -> Iterator[Piece]:
        """Yield this rank's optimizer pieces. Rank 0 keeps the number of updates, equal for all."""
        first = self.accelerator.process_index == 0
        for shard in shards:
            for key, value in self.optimizer.state.get(shard.flat, {}).items():
                if value.shape == shard.flat.shape:
                    yield shard.piece(f"{shard.name}/{key}", value)
        if first:
            for name, updates in self._updates().items():
                yield whole_piece(f"{name}/step", updates)

    def _updates(self) -> dict[str, torch.Tensor]:
        """Return the number of updates by parameter, as in a state that is not sharded."""
        states = [state for state in self.optimizer.state.values() if "step" in state]
        if not states:
            return {}
        trained = [name for name, item in self.module.named_parameters() if item.requires_grad]
        return {name: states[0]["step"].detach().cpu() for name in trained}

    def _moments(self, shards: Sequence[Shard]) -> dict[str, Region]:
        """Return the regions of the moments, allocated as AdamW does at its first step."""
        regions: dict[str, Region] = {}
        for shard in shards:
            state = self.optimizer.state[shard.flat]
            if not state:
                state["step"] = torch.zeros(())
                state.update({key: torch.zeros_like(shard.flat) for key in MOMENTS})
            regions |= {f"{shard.name}/{key}": shard.region(state[key]) for key in MOMENTS}
            regions[f"{shard.name}/step"] = whole(state["step"])
        return regions

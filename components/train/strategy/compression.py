"""Compressed gradients in DDP: PyTorch's hooks, with their state in checkpoints.

PowerSGD (Vogels et al. 2019) adds what a step's compression lost to the next gradient. That error
differs by rank, so each rank saves its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from steadytrain.components.techniques.gradient_compression import CompressionConfig
from steadytrain.components.train.checkpoint import Checkpoint
from steadytrain.components.train.checkpoint.region import whole
from steadytrain.components.train.checkpoint.snapshot import Piece, whole_piece

PART: Final = "compression"
"""The part of a checkpoint."""


class Compression:
    """The hook of a DDP model, and its state on this rank.

    Args:
        device: where the gradients are.
        rank, world_size: of this process.
    """

    def __init__(
        self,
        config: CompressionConfig,
        model: DistributedDataParallel,
        *,
        device: torch.device,
        rank: int,
        world_size: int,
    ) -> None:
        self.device, self.rank, self.world_size = device, rank, world_size
        self._state: PowerSGDState | None = None
        if config.kind == "bf16":
            model.register_comm_hook(None, bf16_compress_hook)
        elif config.kind == "powersgd":
            self._state = PowerSGDState(
                None,
                matrix_approximation_rank=config.rank,
                start_powerSGD_iter=config.start,
                # Columns of zeros, as of embeddings that no batch has used, have no direction.
                orthogonalization_epsilon=1e-8,
            )
            model.register_comm_hook(self._state, _in_order)

    def settings(self) -> dict[str, Any]:
        """Return the rest of the state as plain data, equal on all ranks."""
        iteration = 0 if self._state is None else self._state.iter
        return {"iteration": iteration, "world_size": self.world_size}

    def pieces(self) -> Sequence[Piece]:
        """Return what this rank saves."""
        own = self._tensors(f"error-{self.rank}")
        # After the exchange, the factors are equal on all ranks.
        shared = self._tensors("p", "q") if self.rank == 0 else {}
        return [whole_piece(name, tensor) for name, tensor in {**own, **shared}.items()]

    def restore(self, checkpoint: Checkpoint, settings: Mapping[str, Any]) -> None:
        """Restore a checkpoint. With another number of ranks, only the iteration continues.

        Raises:
            CheckpointDamaged: the checkpoint differs from what was written.
        """
        if self._state is None:
            return
        self._state.iter = settings["iteration"]
        if settings["world_size"] != self.world_size:
            return
        own = {}
        for name, saved in checkpoint.outline(PART).items():
            kind, _, bucket = name.rpartition("-")
            # Not the other ranks' errors: each is as large as the gradients.
            if kind in self._named():
                own[name] = torch.empty_like(saved, device=self.device)
                self._named()[kind][int(bucket)] = own[name]
        checkpoint.copy_into(PART, {name: whole(tensor) for name, tensor in own.items()})

    def _named(self) -> Mapping[str, dict[int, torch.Tensor]]:
        if self._state is None:
            return {}
        return {
            f"error-{self.rank}": self._state.error_dict,
            "p": self._state.p_memory_dict,
            "q": self._state.q_memory_dict,
        }

    def _tensors(self, *kinds: str) -> dict[str, torch.Tensor]:
        return {
            f"{kind}-{bucket}": tensor
            for kind, tensors in self._named().items()
            if kind in kinds
            for bucket, tensor in tensors.items()
        }


def _in_order(state, bucket):  # type: ignore[no-untyped-def]  # DDP rejects postponed annotations
    """Compress and exchange a bucket before the next one.

    A bucket takes three exchanges, each from a callback of the one before. With gloo, callbacks of
    several buckets run in an order that differs by rank, and ranks would mix up the exchanges. On a
    GPU, waiting does not block: the exchanges are queued in order anyway.
    """
    exchanged = powerSGD_hook(state, bucket)
    exchanged.wait()
    return exchanged

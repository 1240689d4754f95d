"""Weights, gradients and optimizer in shards, one per rank: PyTorch's FSDP2 (`fully_shard`).

It does not use accelerate, which supports FSDP only on accelerators: GPUs would then run different
code from what is tested on a CPU.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from steadytrain.components.train.checkpoint import Checkpoint
from steadytrain.components.train.checkpoint.snapshot import Piece, Region, full_piece, whole
from steadytrain.components.train.checkpoint.state import (
    model_tensors,
    optimizer_tensors,
    restore_model,
    restore_optimizer,
)
from steadytrain.components.train.strategy.base import MakeOptimizer, Strategy


class FullySharded(Strategy):
    """A layer's weights are complete on a rank only while it computes with them.

    Args:
        bf16: whether layers compute in bfloat16. Weights and gradient sums stay float32.
        offload: whether weights, gradients and optimizer stay in host memory.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        module: torch.nn.Module,
        make_optimizer: MakeOptimizer,
        *,
        bf16: bool = False,
        offload: bool = False,
    ) -> None:
        self.accelerator = accelerator
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        shard(module, mesh, bf16=bf16, offload=offload)
        self.module = self.model = module
        # While its layer is gathered, the module has the full weight in place of this part.
        self._shards = {
            name: item
            for name, item in module.named_parameters()
            if item.requires_grad and isinstance(item, DTensor)
        }
        self.optimizer, self.optimizer_spec = make_optimizer(module), make_optimizer.spec

    def micro_batch(self, *, last: bool) -> contextlib.AbstractContextManager[Any]:
        # Reduce gradients into shards in every micro-batch. Otherwise, full ones would be kept.
        del last
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def clip(self, limit: float) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), limit)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def pieces(self) -> Mapping[str, Sequence[Piece]]:
        parts = {
            "model": model_tensors(self.module),
            "optimizer": optimizer_tensors(self.module, self.optimizer, self.optimizer_spec),
        }
        return {part: list(self._own(tensors)) for part, tensors in parts.items()}

    def restore(self, checkpoint: Checkpoint, settings: Mapping[str, Any]) -> None:
        restore_model(self.module, checkpoint, _region)
        restore_optimizer(
            self.module,
            self.optimizer,
            self.optimizer_spec,
            checkpoint,
            settings["groups"],
            _region,
        )

    def weights(self) -> Mapping[str, torch.Tensor]:
        return _LocalParts(self._shards)

    def moments(self, key: str) -> Mapping[str, torch.Tensor]:
        state = self.optimizer.state
        return {
            name: _local(state[item][key])
            for name, item in self._shards.items()
            if key in state.get(item, {})
        }

    def gradients(self) -> Mapping[str, torch.Tensor]:
        # FSDP makes them in shards, as the weights are.
        return {
            name: _local(item.grad)
            for name, item in self._shards.items()
            if isinstance(item.grad, DTensor)
        }

    def weight_pieces(self, tensors: Mapping[str, torch.Tensor], suffix: str) -> list[Piece]:
        held = ((name, item, self._shards[name]) for name, item in tensors.items() if item.numel())
        return [
            Piece(f"{name}{suffix}", item, list(_place(shard)), list(shard.shape))
            for name, item, shard in held
        ]

    def weight_regions(self, tensors: Mapping[str, torch.Tensor], suffix: str) -> dict[str, Region]:
        return {
            f"{name}{suffix}": _region_of(item, self._shards[name])
            for name, item in tensors.items()
        }

    def _spread(self) -> None:
        # Weights gathered for the last forward pass are stale.
        for part in self.module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

    def _own(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[Piece]:
        """Yield this rank's pieces. Rank 0 keeps tensors that are identical on all ranks."""
        for name, tensor in tensors.items():
            if isinstance(tensor, DTensor):
                local = _local(tensor)
                if local.numel():
                    yield Piece(name, local, list(_place(tensor)), list(tensor.shape))
            elif self.accelerator.process_index == 0:
                yield full_piece(name, tensor)


class _LocalParts(Mapping[str, torch.Tensor]):
    """Looks local tensors up at each access.

    FSDP may replace them in the first forward pass, for example to move them to pinned memory.
    """

    def __init__(self, shards: Mapping[str, DTensor]) -> None:
        self._shards = shards

    def __getitem__(self, name: str) -> torch.Tensor:
        return _local(self._shards[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)


def shard(module: Any, mesh: DeviceMesh, *, bf16: bool, offload: bool = False) -> None:
    """Shard a model's weights over the ranks of a mesh, in place, layer by layer."""
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if bf16
        else MixedPrecisionPolicy()
    )
    moving = CPUOffloadPolicy() if offload else OffloadPolicy()
    layers = _layers(module)
    for part in (*layers, module):
        fully_shard(part, mesh=mesh, mp_policy=policy, offload_policy=moving)
    _prefetch(module, layers)
    if mesh.device_type == "cpu":
        # Without streams, a gather would block the computation that it should overlap with.
        module._set_unshard_async_op(True)


def _prefetch(module: Any, layers: Sequence[Any]) -> None:
    """Gather the next layer's weights while the current layer computes.

    In the backward pass, FSDP does this itself, based on the order in which layers computed.
    """
    for part, following in pairwise((module, *layers)):
        part.set_modules_to_forward_prefetch([following])


def _layers(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the units that are gathered together: the layers that Transformers lists for that.

    One that shares a weight with another part, as BERT's embeddings with its head, is left out:
    FSDP gathers that weight with the rest of the model.
    """
    names = set(getattr(module, "_no_split_modules", None) or ())
    uses = _uses(module)
    return [
        layer
        for layer in module.modules()
        if type(layer).__name__ in names and _uses(layer).items() <= uses.items()
    ]


def _uses(module: torch.nn.Module) -> Counter[int]:
    """Return how many modules within this one have each parameter, by its id."""
    return Counter(id(item) for part in module.modules() for item in part.parameters(recurse=False))


def _region(tensor: torch.Tensor) -> Region:
    return _region_of(_local(tensor), tensor) if isinstance(tensor, DTensor) else whole(tensor)


def _region_of(local: torch.Tensor, tensor: DTensor) -> Region:
    """Return the region of a local tensor that is sharded like `tensor`."""
    row = tensor.numel() // max(1, tensor.shape[0])
    return Region(local.view(-1), _place(tensor)[0] * row, tensor.numel())


def _local(tensor: DTensor) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local()
    return local.detach()


def _place(tensor: DTensor) -> Sequence[int]:
    """Return where this rank's rows start."""
    _, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return offsets

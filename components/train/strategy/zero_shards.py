"""Locate a rank's part of the optimizer's weights and moments within DeepSpeed.

A ZeRO optimizer works on flat tensors, each with ranges of many parameters one after another, and
padding at the end. Their layout is internal to DeepSpeed; tests check it for the locked version.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from steadytrain.components.train.checkpoint.region import Region
from steadytrain.components.train.checkpoint.snapshot import Piece


@dataclass(frozen=True)
class Shard:
    """The range of a parameter's elements that this rank's optimizer updates.

    flat: the tensor that contains the range, from `offset` on; also the key of the optimizer's
        state.
    start: index of the first element within the parameter.
    count: number of elements.
    size: number of elements of the full parameter.
    """

    name: str
    parameter: torch.nn.Parameter
    flat: torch.Tensor
    offset: int
    start: int
    count: int
    size: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the same range of another tensor with the layout of `flat`."""
        return flat.detach().narrow(0, self.offset, self.count)

    def piece(self, name: str, flat: torch.Tensor) -> Piece:
        return Piece(name, self.of(flat), [self.start], [self.size])

    def region(self, flat: torch.Tensor) -> Region:
        return Region(self.of(flat), self.start, self.size)


def shards_of(zero: Any, module: torch.nn.Module, stage: int) -> Iterator[Shard]:
    """Yield this rank's shards of the parameters that are trained.

    Args:
        zero: DeepSpeed's optimizer for that stage.
    """
    found = _of_weights if stage == 3 else _of_states
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            shard = found(zero, name, parameter)
            if shard is not None and shard.count > 0:
                yield shard


def spread_weights(zero: Any, shards: Sequence[Shard], stage: int) -> None:
    """Copy the optimizer's restored weights to the model."""
    if stage < 3:
        zero.update_lp_params()
        return
    for shard in shards:
        own: torch.Tensor = shard.parameter.ds_tensor  # type: ignore[attr-defined]
        own.data.narrow(0, 0, shard.count).copy_(shard.of(shard.flat))
    # Release the parameters that are complete on every rank: they are stale, and are gathered again
    # when needed. If they were gathered here, they would be missing from the trace that DeepSpeed
    # uses to fetch weights from then on.
    stale = [item for item in zero.persistent_parameters if item.ds_status.name == "AVAILABLE"]
    if stale:
        stale[0].partition(stale)


def _of_states(zero: Any, name: str, parameter: Any) -> Shard | None:
    """Stages 1 and 2: a group's parameters are stored one after another, split into equal parts."""
    place = parameter._hp_mapping
    if place is None:
        return None
    held, own = place.lp_fragment_address, place.hp_fragment_address
    flat = zero.single_partition_of_fp32_groups[place.param_group_index]
    return Shard(name, parameter, flat, own.start, held.start, held.numel, parameter.numel())


def _of_weights(zero: Any, name: str, parameter: Any) -> Shard:
    """Stage 3: each parameter is split into equal parts. The last part is padded."""
    group, offset, part = zero.grad_position[zero.get_param_id(parameter)]
    start = part * torch.distributed.get_rank()
    count = min(part, parameter.ds_numel - start)
    flat = zero.fp32_partitioned_groups_flat[group]
    return Shard(name, parameter, flat, offset, start, count, parameter.ds_numel)

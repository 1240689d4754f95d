"""Where DeepSpeed keeps a rank's part of the optimizer's weights and moments.

An optimizer of ZeRO works on flat tensors, each of many parameters' stretches one behind another
and padded at its end. DeepSpeed has these places to itself; tests hold them to the locked version.
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
    """A stretch of a parameter that this rank's optimizer changes.

    flat: the tensor in which it lies, from `offset` on; also the key of the optimizer's state.
    start: of its first element within the parameter. count: of its elements.
    """

    name: str
    parameter: torch.nn.Parameter
    flat: torch.Tensor
    offset: int
    start: int
    count: int
    size: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The same stretch of another tensor that is laid out as `flat`."""
        return flat.detach().narrow(0, self.offset, self.count)

    def piece(self, name: str, flat: torch.Tensor) -> Piece:
        return Piece(name, self.of(flat), [self.start], [self.size])

    def region(self, flat: torch.Tensor) -> Region:
        return Region(self.of(flat), self.start, self.size)


def shards_of(zero: Any, module: torch.nn.Module, stage: int) -> Iterator[Shard]:
    """This rank's shards of the parameters that are trained.

    Args:
        zero: DeepSpeed's optimizer of that stage.
    """
    found = _of_weights if stage == 3 else _of_states
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            shard = found(zero, name, parameter)
            if shard is not None and shard.count > 0:
                yield shard


def spread_weights(zero: Any, shards: Sequence[Shard], stage: int) -> None:
    """Gives the model what its optimizer's weights have become."""
    if stage < 3:
        zero.update_lp_params()
        return
    for shard in shards:
        own: torch.Tensor = shard.parameter.ds_tensor  # type: ignore[attr-defined]
        own.data.narrow(0, 0, shard.count).copy_(shard.of(shard.flat))
    # Those that are whole on each rank just now are gathered anew where they are needed. Gathered
    # here, they would not be in the trace by which DeepSpeed fetches weights from then on.
    stale = [item for item in zero.persistent_parameters if item.ds_status.name == "AVAILABLE"]
    if stale:
        stale[0].partition(stale)


def _of_states(zero: Any, name: str, parameter: Any) -> Shard | None:
    """Stages 1 and 2: the group's parameters lie one behind another, cut into equal parts."""
    place = parameter._hp_mapping
    if place is None:
        return None
    held, own = place.lp_fragment_address, place.hp_fragment_address
    flat = zero.single_partition_of_fp32_groups[place.param_group_index]
    return Shard(name, parameter, flat, own.start, held.start, held.numel, parameter.numel())


def _of_weights(zero: Any, name: str, parameter: Any) -> Shard:
    """Stage 3: each parameter is cut into equal parts, the last of them padded."""
    group, offset, part = zero.grad_position[zero.get_param_id(parameter)]
    start = part * torch.distributed.get_rank()
    count = min(part, parameter.ds_numel - start)
    flat = zero.fp32_partitioned_groups_flat[group]
    return Shard(name, parameter, flat, offset, start, count, parameter.ds_numel)

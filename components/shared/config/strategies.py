"""What the product must know about a strategy, whichever package provides it.

The package registers a `StrategySpec` under the name that `compute.strategy` takes, in the group
`steadytrain.strategies`. Validation, the planner and the supervisor read specs, so the module of a
spec must not import torch, except inside its functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, Literal, Protocol

from steadytrain.components.shared import plugins
from steadytrain.components.shared.errors import BadInput

AUTO: Final = "auto"
"""In `compute.strategy`, leaves the choice to the planner."""
Offload = Literal["none", "optimizer", "disk", "all"]
DISK: Final = "disk"
"""In `compute.offload`, keeps what the optimizer works on in files."""
State = Literal["optimizer", "gradients", "weights"]
DistributedType = Literal["", "NO", "MULTI_GPU", "FSDP", "DEEPSPEED"]


class Build(Protocol):
    """Sets up a model and its optimizer on the ranks."""

    def __call__(
        self,
        config: Any,
        accelerator: Any,
        module: Any,
        make_optimizer: Any,
        *,
        offload: Offload,
    ) -> Any:
        """Return a `train.strategy.base.Strategy`.

        Args:
            config: the RunConfig.
            accelerator: accelerate's, with the device and the process group.
            module: the task's model, in host memory and identical on all ranks.
            make_optimizer: a `train.strategy.base.MakeOptimizer`.
        """


@dataclass(frozen=True, kw_only=True)
class StrategySpec:
    """How ranks share the state of a training run, and what that does not support.

    title: the name in reports.
    build: see `Build`.
    shards: the parts of the state of which each rank has only its own shard.
    offloads: the values of `compute.offload` that it supports, the smallest first.
    max_ranks: most ranks; None means any number.
    library: the package that it needs in addition to PyTorch; "" if none.
    unsupported: for each setting that it does not support, why. A setting is a field, followed by
        its value unless that is true: "training.fp16", "model.adapter.kind qlora".
    fallback: name of the strategy that a run changes to when it is out of device memory; "" if
        none needs less.
    accelerate: what `accelerate launch` calls it in `distributed_type`; "" if accelerate has
        nothing like it.
    """

    title: str
    build: Build
    shards: frozenset[State] = frozenset()
    offloads: tuple[Offload, ...] = ()
    max_ranks: int | None = None
    library: str = ""
    unsupported: Mapping[str, str] = field(default_factory=dict)
    fallback: str = ""
    accelerate: DistributedType = ""

    @property
    def zero_stage(self) -> int:
        """The stage of ZeRO that shards as much: 1 to 3, or 0 if each rank has everything."""
        return len(self.shards)


@cache
def strategy_spec(name: str) -> StrategySpec:
    """Return the spec of a strategy.

    Raises:
        BadInput: no installed package provides it, or its module cannot be imported.
    """
    return plugins.load_as(plugins.STRATEGIES, name, StrategySpec)


def fallback_of(name: str, prefer: str | None) -> str:
    """Return the strategy that a run changes to when it is out of device memory; "" if none.

    Args:
        prefer: the value of `compute.prefer`. With deepspeed, ZeRO-2 takes the place of FSDP, and
            goes on to ZeRO-3.
    """
    spec = strategy_spec(name)
    native = spec.fallback == "fsdp" and not spec.shards
    return "zero2" if native and prefer == "deepspeed" else spec.fallback


def strategy_features(name: str) -> set[str]:
    """Return what an optimizer must support to be used with a strategy (`OptimizerSpec`)."""
    return {name, "sharding"} if strategy_spec(name).shards else {name}


def check_strategy(name: str) -> str:
    """Return the name of a strategy, or "auto", if it can be used.

    Raises:
        ValueError: no installed package provides it, or its module cannot be imported.
    """
    if name != AUTO:
        try:
            strategy_spec(name)
        except BadInput as error:
            raise ValueError(f"{error.message}: {error.remedy}") from None
    return name


def strategies_that_offload(kind: str) -> list[str]:
    """Return the names of all strategies that support a value of `compute.offload`."""
    names = plugins.names(plugins.STRATEGIES)
    return [name for name in names if kind in strategy_spec(name).offloads]

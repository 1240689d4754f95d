"""What the product must know about an optimizer, whichever package provides it.

The package registers an `OptimizerSpec` under the name that `training.optim` takes, in the group
`steadytrain.optimizers`. Validation and the planner read specs, so the module of a spec must not
import torch, except inside its functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, Literal, Protocol

from steadytrain.components.shared import plugins
from steadytrain.components.shared.config.training import TrainingConfig
from steadytrain.components.shared.effects import at_odds

DEFAULT: Final[str] = TrainingConfig.model_fields["optim"].default
ADAM_SETTINGS: Final = ("adam_beta1", "adam_beta2", "adam_epsilon")
"""The fields of `training` for AdamW and its relatives."""


class Build(Protocol):
    """Builds an optimizer for parameter groups, each with its own `weight_decay`.

    A group whose learning rate differs from that of `training` has an `lr`.

    With `OptimizerSpec.separates_matrices`, each group also has `matrices`: whether its parameters
    are the matrices of the model's layers.
    """

    def __call__(
        self, groups: list[dict[str, Any]], training: TrainingConfig, *, scaled: bool
    ) -> Any:
        """Return the `torch.optim.Optimizer`.

        Args:
            training: its learning rate is set.
            scaled: whether a loss scaler skips updates that overflow.
        """


@dataclass(frozen=True)
class StateTensor:
    """A tensor that an optimizer keeps for each parameter.

    name: its key in `optimizer.state[parameter]`.
    bytes: memory for each trained weight; 0 if the size does not depend on the parameter.
    same_shape: whether it has the parameter's shape. Only then can ranks shard it.
    paged: whether it moves to host memory if the GPU's runs short.
    of: which parameters have it: the matrices of the model's layers, the others, or all.
    """

    name: str
    bytes: float = 4.0
    same_shape: bool = True
    paged: bool = False
    of: Literal["all", "matrices", "others"] = "all"

    def average_bytes(self, matrices: float) -> float:
        """Return the memory for a weight on average, if a share of them is in such matrices."""
        return self.bytes * {"all": 1.0, "matrices": matrices, "others": 1 - matrices}[self.of]


@dataclass(frozen=True)
class OptimizerSpec:
    """How to build an optimizer, what it keeps for each parameter, and what it does not support.

    build: see `Build`.
    tensors: the tensors in `optimizer.state[parameter]`, apart from scalars.
    scalars: keys of its tensors with a single value and no dimension, such as "step".
    numbers: keys of its Python numbers.
    unsupported: for each feature that the optimizer does not support, why. A feature is the name
        of a strategy, a key of `compatibility.FEATURES` such as "cpu", "sharding" or "schedule", or
        a setting such as "training.param_groups unfreeze_at".
    update_bytes: memory that an update needs in addition, for each trained weight.
    scaled_update_bytes: the same with a loss scaler.
    allocate: allocates a parameter's state in the optimizer, before a checkpoint is copied into it.
        None means as plain tensors.
    own_kernels: whether its kernels are compiled apart from PyTorch, so that a run tries them
        before it relies on them.
    title: what plans call it; "" means the name under which it is registered.
    options: called with `training.optim_args` as keyword arguments when a configuration is
        validated; raises an exception if it does not take them. `build` reads them in `training`.
    factored: whether it keeps, in 32 bits, one value for each row and column of a matrix, and one
        for each weight of a vector. Their `StateTensor` has 0 bytes.
    adam_settings: the fields of `training` among `ADAM_SETTINGS` that `build` or `evaluated` read.
        A configuration that sets another one of them is rejected.
    separates_matrices: whether it updates the matrices of the model's layers in another way than
        embeddings, head, biases and norms; see `Build`.
    update_flops: FLOPs of the update of one matrix of the model's layers, from its rows, its
        columns and the configuration. None means that an update takes next to no time.
    evaluated: returns the weight to validate and export, from a trained weight, the tensors of its
        state with the same shape, and the configuration. It works on any part of a weight. None
        means the trained weight itself.
    """

    build: Build
    tensors: tuple[StateTensor, ...] = ()
    scalars: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    unsupported: Mapping[str, str] = field(default_factory=dict)
    update_bytes: float = 0.0
    scaled_update_bytes: float = 0.0
    allocate: Callable[[Any, Any], None] | None = None
    own_kernels: bool = False
    title: str = ""
    options: Callable[..., Any] = plugins.no_options
    factored: bool = False
    adam_settings: tuple[str, ...] = ADAM_SETTINGS
    separates_matrices: bool = False
    update_flops: Callable[[int, int, TrainingConfig], float] | None = None
    evaluated: Callable[[Any, Mapping[str, Any], TrainingConfig], Any] | None = None

    def device_bytes(self, matrices: float) -> float:
        """State in device memory for each trained weight.

        Args:
            matrices: share of the trained weights that are in matrices of the model's layers.
        """
        return sum(item.average_bytes(matrices) for item in self.tensors if not item.paged)

    def host_bytes(self, matrices: float) -> float:
        """State that may move to host memory, for each trained weight."""
        return sum(item.average_bytes(matrices) for item in self.tensors if item.paged)


@cache
def optimizer_spec(name: str) -> OptimizerSpec:
    """Return the spec of an optimizer.

    Raises:
        BadInput: no installed package provides it, or its module cannot be imported.
    """
    return plugins.load_as(plugins.OPTIMIZERS, name, OptimizerSpec)


def unread_settings(optim: object) -> list[str]:
    """Return the fields of `training` among `ADAM_SETTINGS` that an optimizer does not read.

    Args:
        optim: its name; for anything else, nothing is known, and nothing returned.

    Raises:
        BadInput: its module cannot be imported.
    """
    if optim not in plugins.names(plugins.OPTIMIZERS):
        return []
    read = optimizer_spec(str(optim)).adam_settings
    return [name for name in ADAM_SETTINGS if name not in read]


def check_settings(training: TrainingConfig) -> None:
    """Reject a setting that the optimizer does not read.

    Raises:
        PydanticCustomError: for the first such field.
    """
    defaults = {name: TrainingConfig.model_fields[name].default for name in ADAM_SETTINGS}
    given = {name: getattr(training, name) for name in ADAM_SETTINGS}
    for name, value in given.items():
        if value != defaults[name] and name in unread_settings(training.optim):
            raise at_odds(
                f"training.{name}",
                value,
                f"training.optim is {training.optim}, which does not read it",
                f"leave it out; if a preset sets it, set it to its default, {defaults[name]}",
            )

"""The product's own optimizers, from PyTorch, bitsandbytes, pytorch_optimizer and schedulefree.

None of them is imported before training starts: pytorch_optimizer alone takes 1.6 s. Those without
a fused kernel update one tensor at a time. Updating all at once (`foreach`) would need another copy
of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Final

from steadytrain.components.shared.config import TrainingConfig
from steadytrain.components.shared.config.optimizers import OptimizerSpec, StateTensor
from steadytrain.components.shared.quantities import is_number

# The options that `training.optim_args` takes, by optimizer: names, defaults and ranges.
#
# Names and defaults are those of the libraries.


@dataclass(frozen=True)
class SgdOptions:
    """momentum: share of the last update in the next one, above 0 and below 1."""

    momentum: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        _check_range("momentum", self.momentum, above=0, below=1)
        _switch("nesterov", self.nesterov)


@dataclass(frozen=True)
class AdafactorOptions:
    """Options of PyTorch's Adafactor (Shazeer and Stern 2018).

    beta2_decay: exponent of the step in the decay of the second moment, negative.
    d: root mean square to which an update is clipped, at least 1.
    """

    beta2_decay: float = -0.8
    d: float = 1.0

    def __post_init__(self) -> None:
        _check_range("beta2_decay", self.beta2_decay, above=-math.inf, below=0)
        if not (is_number(self.d) and self.d >= 1):
            raise ValueError(f"d is {self.d!r}: give a number of at least 1")


@dataclass(frozen=True)
class LarsOptions:
    """Options of LARS (You et al. 2017).

    momentum: as for SGD.
    trust_coefficient: norm of a layer's update as a share of its weights' norm.
    """

    momentum: float = 0.9
    trust_coefficient: float = 0.001

    def __post_init__(self) -> None:
        _check_range("momentum", self.momentum, above=0, below=1)
        _check_range("trust_coefficient", self.trust_coefficient, above=0, below=math.inf)


@dataclass(frozen=True)
class LionOptions:
    """Options of Lion (Chen et al. 2023).

    beta1: share of the momentum in the update whose sign is used.
    beta2: decay of the momentum.
    """

    beta1: float = 0.9
    beta2: float = 0.99

    def __post_init__(self) -> None:
        _check_range("beta1", self.beta1, above=0, below=1)
        _check_range("beta2", self.beta2, above=0, below=1)

    @property
    def betas(self) -> tuple[float, float]:
        return self.beta1, self.beta2


@dataclass(frozen=True)
class MuonOptions:
    """Options of Muon (Jordan et al. 2024).

    momentum: as for SGD.
    ns_steps: Newton-Schulz iterations that orthogonalize an update.
    """

    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5

    def __post_init__(self) -> None:
        _check_range("momentum", self.momentum, above=0, below=1)
        _switch("nesterov", self.nesterov)
        if not (type(self.ns_steps) is int and 1 <= self.ns_steps < 100):
            raise ValueError(f"ns_steps is {self.ns_steps!r}: give a whole number from 1 to 99")


@dataclass(frozen=True)
class ScheduleFreeOptions:
    """Options of schedule-free AdamW (Defazio et al. 2024).

    r: power of the step in the weight of a step in the average, at least 0.
    weight_lr_power: power of the learning rate in that weight, at least 0.
    """

    r: float = 0.0
    weight_lr_power: float = 2.0

    def __post_init__(self) -> None:
        for name, value in (("r", self.r), ("weight_lr_power", self.weight_lr_power)):
            if not (is_number(value) and 0 <= value < math.inf):
                raise ValueError(f"{name} is {value!r}: give a number of at least 0")


def _check_range(name: str, value: float, *, above: float, below: float) -> None:
    if not (is_number(value) and above < value < below):
        raise ValueError(f"{name} is {value!r}: give a number above {above:g} and below {below:g}")


def _switch(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}: give true or false")


_BLOCK: Final = 256
"""Weights that share a 32-bit constant for each 8-bit moment, in bitsandbytes."""
_UNSHARDED: Final = {"sharding": "bitsandbytes updates complete tensors only"}
_COUNTS: Final = {
    "training.param_groups unfreeze_at": "it corrects its moments by the steps of a group, which "
    "count before its weights are trained"
}
_NORMS: Final = {"sharding": "it computes norms of complete tensors, and ranks have parts of them"}


def _settings(training: TrainingConfig) -> dict[str, Any]:
    return {
        "lr": training.learning_rate,
        "betas": (training.adam_beta1, training.adam_beta2),
        "eps": training.adam_epsilon,
    }


def _adam(
    kind: str, groups: list[dict[str, Any]], training: TrainingConfig, *, scaled: bool
) -> Any:
    import torch

    # A fused update needs a quarter of the time and no extra memory. With a scaler, it would skip
    # steps inside its kernel, where nothing reports them.
    return getattr(torch.optim, kind)(groups, **_settings(training), fused=not scaled)


def _sgd(groups: list[dict[str, Any]], training: TrainingConfig, **_: bool) -> Any:
    import torch

    options = asdict(SgdOptions(**training.optim_args))
    # The fused update does not take FSDP's shards.
    return torch.optim.SGD(groups, _settings(training)["lr"], **options, foreach=False)


def _adafactor(groups: list[dict[str, Any]], training: TrainingConfig, **_: bool) -> Any:
    import torch

    options = asdict(AdafactorOptions(**training.optim_args))
    return torch.optim.Adafactor(groups, _settings(training)["lr"], **options, foreach=False)


def _muon(groups: list[dict[str, Any]], training: TrainingConfig, *, scaled: bool) -> Any:
    from steadytrain.components.train.muon import MuonWithAdamW

    options = asdict(MuonOptions(**training.optim_args))
    adamw = partial(_adam, "AdamW", training=training, scaled=scaled)
    return MuonWithAdamW(groups, adamw, lr=_settings(training)["lr"], **options)


def _newton_schulz(rows: int, columns: int, training: TrainingConfig) -> float:
    """Return the FLOPs of orthogonalizing an update (Jordan et al. 2024).

    Each iteration multiplies the matrix with itself, squares that, and multiplies the matrix again.
    """
    short, long = sorted((rows, columns))
    steps = MuonOptions(**training.optim_args).ns_steps
    return steps * (4.0 * short**2 * long + 2.0 * short**3)


def _lamb(groups: list[dict[str, Any]], training: TrainingConfig, **_: bool) -> Any:
    import pytorch_optimizer

    # In the paper, the norm of an update includes the weight decay.
    return pytorch_optimizer.Lamb(
        groups, **_settings(training), weight_decouple=False, foreach=False
    )


def _lars(groups: list[dict[str, Any]], training: TrainingConfig, **_: bool) -> Any:
    import pytorch_optimizer

    options = asdict(LarsOptions(**training.optim_args))
    return pytorch_optimizer.LARS(groups, _settings(training)["lr"], **options, foreach=False)


def _lion(groups: list[dict[str, Any]], training: TrainingConfig, **_: bool) -> Any:
    import pytorch_optimizer

    betas = LionOptions(**training.optim_args).betas
    return pytorch_optimizer.Lion(groups, _settings(training)["lr"], betas, foreach=False)


def _schedule_free(groups: list[dict[str, Any]], training: TrainingConfig, **_: bool) -> Any:
    import schedulefree

    options = asdict(ScheduleFreeOptions(**training.optim_args))
    made = schedulefree.AdamWScheduleFree(groups, **_settings(training), **options, foreach=False)
    made.train()
    return made


def _averaged(weight: Any, state: Mapping[str, Any], training: TrainingConfig) -> Any:
    """Return the average x, from the weight y at which gradients are computed.

    y = beta1 x + (1 - beta1) z (Defazio et al. 2024, "The Road Less Scheduled", equation 3).
    """
    return weight.lerp(state["z"], 1 - 1 / training.adam_beta1)


def _bitsandbytes(
    kind: str, groups: list[dict[str, Any]], training: TrainingConfig, **_: bool
) -> Any:
    import bitsandbytes.optim

    return getattr(bitsandbytes.optim, kind)(groups, **_settings(training))


def _allocate_8bit(optimizer: Any, parameter: Any) -> None:
    """Allocate as the first update does, since plain tensors would bypass paged memory."""
    optimizer.check_overrides()
    optimizer.initialized = True
    for number, group in enumerate(optimizer.param_groups):
        for index, item in enumerate(group["params"]):
            if item is parameter:
                optimizer.init_state(group, parameter, number, index)


def _moments_8bit(*, paged: bool) -> tuple[StateTensor, ...]:
    return (
        *(StateTensor(name, 1.0, paged=paged) for name in ("state1", "state2")),
        *(StateTensor(name, 4 / _BLOCK, same_shape=False) for name in ("absmax1", "absmax2")),
        *(StateTensor(name, 0.0, same_shape=False) for name in ("qmap1", "qmap2")),
    )


ADAMW: Final = OptimizerSpec(
    build=partial(_adam, "AdamW"),
    tensors=(StateTensor("exp_avg"), StateTensor("exp_avg_sq")),
    scalars=("step",),
    # Unfused, AdamW processes all tensors at once, with an intermediate of the same size
    # (PyTorch's documentation of `foreach`).
    scaled_update_bytes=4.0,
)
ADAMW_8BIT: Final = OptimizerSpec(
    build=partial(_bitsandbytes, "AdamW8bit"),
    tensors=_moments_8bit(paged=False),
    numbers=("step",),
    unsupported=_UNSHARDED,
    allocate=_allocate_8bit,
    own_kernels=True,
    title="8-bit AdamW",
)
PAGED_ADAMW_8BIT: Final = OptimizerSpec(
    build=partial(_bitsandbytes, "PagedAdamW8bit"),
    tensors=_moments_8bit(paged=True),
    numbers=("step",),
    unsupported={"cpu": "only CUDA's memory is paged", **_UNSHARDED},
    allocate=_allocate_8bit,
    own_kernels=True,
    title="8-bit AdamW",
)
"""Its moments move to host memory when the GPU's runs short (Dettmers et al. 2023, "QLoRA",
section 3)."""
ADAM: Final = replace(ADAMW, build=partial(_adam, "Adam"))
"""Its weight decay is added to the gradient."""
SGD: Final = OptimizerSpec(
    build=_sgd,
    tensors=(StateTensor("momentum_buffer"),),
    options=SgdOptions,
    adam_settings=(),
)
ADAFACTOR: Final = OptimizerSpec(
    build=_adafactor,
    tensors=tuple(
        StateTensor(name, 0.0, same_shape=False) for name in ("row_var", "col_var", "variance")
    ),
    scalars=("step",),
    factored=True,
    unsupported=_NORMS,
    options=AdafactorOptions,
    adam_settings=(),
)
LAMB: Final = OptimizerSpec(
    build=_lamb,
    tensors=ADAMW.tensors,
    scalars=("weight_norm", "adam_norm", "trust_ratio"),
    unsupported={**_NORMS, **_COUNTS},
)
LARS: Final = OptimizerSpec(
    build=_lars,
    tensors=SGD.tensors,
    unsupported=_NORMS,
    options=LarsOptions,
    adam_settings=(),
)
LION: Final = OptimizerSpec(
    build=_lion,
    tensors=(StateTensor("exp_avg"),),
    options=LionOptions,
    adam_settings=(),
)
MUON: Final = OptimizerSpec(
    build=_muon,
    tensors=(
        StateTensor("momentum_buffer", of="matrices"),
        *(StateTensor(tensor.name, of="others") for tensor in ADAMW.tensors),
    ),
    scalars=("step",),
    unsupported={"sharding": "it updates whole matrices, and ranks have parts of them"},
    scaled_update_bytes=ADAMW.scaled_update_bytes,
    options=MuonOptions,
    separates_matrices=True,
    update_flops=_newton_schulz,
)
SCHEDULE_FREE_ADAMW: Final = OptimizerSpec(
    build=_schedule_free,
    tensors=(StateTensor("z"), StateTensor("exp_avg_sq")),
    unsupported={
        "schedule": "it averages weights instead of lowering the learning rate, so it needs "
        "constant_with_warmup or constant",
        "averaging": "it averages the weights itself",
        "adam_beta1 0": "it divides by beta1",
        **_COUNTS,
        "zero3": "it counts the steps of a group, and ZeRO-3 updates a group in several steps",
    },
    options=ScheduleFreeOptions,
    evaluated=_averaged,
)

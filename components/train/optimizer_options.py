"""The options that `training.optim_args` takes, by optimizer: names, defaults and ranges.

Names and defaults are those of the libraries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from steadytrain.components.shared.quantities import is_number


@dataclass(frozen=True)
class SgdOptions:
    """momentum: share of the last update in the next one, above 0 and below 1."""

    momentum: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        _within("momentum", self.momentum, above=0, below=1)
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
        _within("beta2_decay", self.beta2_decay, above=-math.inf, below=0)
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
        _within("momentum", self.momentum, above=0, below=1)
        _within("trust_coefficient", self.trust_coefficient, above=0, below=math.inf)


@dataclass(frozen=True)
class LionOptions:
    """Options of Lion (Chen et al. 2023).

    beta1: share of the momentum in the update whose sign is used.
    beta2: decay of the momentum.
    """

    beta1: float = 0.9
    beta2: float = 0.99

    def __post_init__(self) -> None:
        _within("beta1", self.beta1, above=0, below=1)
        _within("beta2", self.beta2, above=0, below=1)

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
        _within("momentum", self.momentum, above=0, below=1)
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


def _within(name: str, value: float, *, above: float, below: float) -> None:
    if not (is_number(value) and above < value < below):
        raise ValueError(f"{name} is {value!r}: give a number above {above:g} and below {below:g}")


def _switch(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}: give true or false")

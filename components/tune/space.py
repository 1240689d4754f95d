"""A study's space: which fields vary in a trial, which values they may take, and its limits."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final

from steadytrain.components.memory.model import any_model_shape, model_name
from steadytrain.components.memory.shape import Shape
from steadytrain.components.shared.batch import REPLICATED
from steadytrain.components.shared.config import ComputeConfig, Dimension, RunConfig
from steadytrain.components.shared.config.space import is_whole
from steadytrain.components.shared.config.strategies import AUTO
from steadytrain.components.shared.config.tune import TuneConstraints
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.sizing.fit import at
from steadytrain.components.sizing.hardware import (
    CPU,
    Gpu,
    all_gpus,
    device_name,
    known_gpu,
    this_cpu,
)
from steadytrain.components.sizing.machine import Machine, Workload
from steadytrain.components.sizing.strategy import TrainingOption
from steadytrain.components.tune.history import Params

Fits = Callable[[Params], bool]
"""Whether parameters keep the study's constraints."""

TRIES: Final = 100
"""Suggestions for one trial, until one fits."""


def seed_of(seed: int, number: int, attempt: int = 0) -> int:
    """Return the seed of one suggestion, below 2^32."""
    text = f"{seed}/{number}/{attempt}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def in_order(space: Mapping[str, Dimension]) -> list[str]:
    """Return the fields of a space, each after those that its condition names."""
    order: list[str] = []

    def add(field: str) -> None:
        for other in space[field].when:
            add(other)
        if field not in order:
            order.append(field)

    for field in space:
        add(field)
    return order


def varies(space: Mapping[str, Dimension], field: str, params: Params) -> bool:
    """Return whether a field varies in a trial, given the fields before it."""
    dimension = space[field]
    return all(
        other in params and dimension.allows(other, params[other]) for other in dimension.when
    )


def contains(field: str, dimension: Dimension, value: object) -> bool:
    """Return whether a value is one of a dimension's."""
    if dimension.choices is not None:
        return as_text(value) in map(as_text, dimension.choices)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    low, high = dimension.ends
    if is_whole(field, dimension) and value != int(value):
        return False
    steps = (value - low) / dimension.step if dimension.step else 0.0
    return low <= value <= high and abs(steps - round(steps)) < 1e-6


def nothing_fits(number: int) -> BadInput:
    """Return the error for a trial without parameters."""
    return BadInput(
        f"tune.constraints: none of {TRIES} suggestions for trial {number} keeps them",
        remedy="relax the constraints, or change the space",
    )


def values_of(field: str, dimension: Dimension, most: int) -> Sequence[Any]:
    """Return the first values, at most `most`, of a dimension that has finitely many."""
    if dimension.choices is not None:
        return dimension.choices[:most]
    count = min(most, _count(dimension))
    return [_nth(field, dimension, index) for index in range(count)]


def _count(dimension: Dimension) -> int:
    low, high = dimension.ends
    return round((high - low) / (dimension.step or 1)) + 1


def _nth(field: str, dimension: Dimension, index: int) -> float:
    value = dimension.ends[0] + index * (dimension.step or 1)
    return int(value) if is_whole(field, dimension) else float(value)


def value_at(field: str, dimension: Dimension, share: float) -> Any:
    """Return the value at a share of a dimension, from 0 to below 1."""
    whole = is_whole(field, dimension) if dimension.choices is None else False
    if dimension.choices is not None:
        return dimension.choices[int(share * len(dimension.choices))]
    if dimension.step or (whole and not dimension.log):
        return _nth(field, dimension, int(share * _count(dimension)))
    low, high = dimension.ends
    if dimension.log:
        # The quotient of high and low can be larger than the largest number.
        value = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
        value = min(high, max(low, value))
        return round(value) if whole else value
    return low + share * (high - low)


def as_text(value: object) -> str:
    """Return plain data as text that is equal for equal data."""
    return json.dumps(value, sort_keys=True)


def share_of(field: str, dimension: Dimension, value: float) -> float:
    """Return where in a range a value is, from 0 to 1: the inverse of `value_at`."""
    low, high = dimension.ends
    if dimension.step or (is_whole(field, dimension) and not dimension.log):
        pitch = dimension.step or 1
        return ((value - low) / pitch + 0.5) / (round((high - low) / pitch) + 1)
    if dimension.log:
        return (math.log(value) - math.log(low)) / (math.log(high) - math.log(low))
    return (value - low) / (high - low)


def satisfies(config: RunConfig, limits: TuneConstraints) -> bool:
    """Return whether a configuration keeps the constraints.

    Raises:
        BadInput: the architecture is unknown, or the machine cannot train it.
    """
    shape = any_model_shape(config)
    small = limits.parameters is None or shape.parameters <= limits.parameters
    return small and (limits.memory_gb is None or _memory(config, shape) <= limits.memory_gb * 1e9)


def _memory(config: RunConfig, shape: Shape) -> int:
    """Return the bytes of a rank by the planner's formula."""
    machine = Machine(_gpu(config), config.compute.nodes, config.compute.nproc_per_node)
    job = Workload(config, model_name(config), shape, machine)
    training, compute, adapter = config.training, config.compute, config.model.adapter
    option = TrainingOption(
        adapter.kind,
        REPLICATED if compute.strategy == AUTO else compute.strategy,
        training.gradient_checkpointing,
        training.optim,
        compute.offload,
        adapter.frozen_embeddings,
        adapter.frozen_head,
    )
    return at(job, option, training.micro_batch or 1).memory.total


def _gpu(config: RunConfig) -> Gpu:
    """Return the device. The formula needs only its kind: CPU or GPU, with bfloat16 or without."""
    name = _device(config.compute.device == CPU)
    if name == CPU:
        return this_cpu(config)
    return known_gpu(name) or all_gpus()[-1]


@cache
def _device(cpu: bool) -> str:
    # Asking the driver takes up to a second.
    return device_name(ComputeConfig(device="cpu" if cpu else "auto"))

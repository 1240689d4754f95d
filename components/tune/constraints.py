"""Whether a trial's configuration keeps the study's constraints, before it trains."""

from __future__ import annotations

from functools import cache

from steadytrain.components.memory.model import any_model_shape, model_name
from steadytrain.components.memory.shape import Shape
from steadytrain.components.shared.batch import REPLICATED
from steadytrain.components.shared.config import ComputeConfig, RunConfig
from steadytrain.components.shared.config.strategies import AUTO
from steadytrain.components.shared.config.tune import TuneConstraints
from steadytrain.components.sizing.device import CPU, device_name, this_cpu
from steadytrain.components.sizing.fit import at
from steadytrain.components.sizing.hardware import Gpu, all_gpus, known_gpu
from steadytrain.components.sizing.machine import Machine, Workload
from steadytrain.components.sizing.strategy import TrainingOption


def keeps(config: RunConfig, limits: TuneConstraints) -> bool:
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

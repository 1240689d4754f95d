"""Which GPUs a plan is for: named ones, a cluster's, or this machine's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import typer

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.processes import host_memory
from steadytrain.components.sizing.hardware import (
    CPU,
    Gpu,
    device_name,
    find_gpu,
    known_gpu,
    this_cpu,
)
from steadytrain.components.sizing.machine import Hosts

ANY: Final = "any"
"""Instead of a GPU's name, leaves the choice to the plan."""


def choose_hardware(
    config: RunConfig,
    table: Sequence[Gpu],
    name: str,
    *,
    cluster: bool,
    own: bool,
    host_memory_gb: float,
) -> tuple[Sequence[Gpu], Gpu | None, Hosts]:
    """Return the GPU kinds to choose from, the wanted kind if any, and what is known of the nodes.

    Args:
        table: the GPU kinds that the planner knows.
        name: the GPU kind to plan for; ANY leaves it open, and "" means what `run` would train on
            here.
        cluster: whether to plan for a cluster's GPUs.
        own: whether to plan for the device that this machine trains on.
        host_memory_gb: RAM of each node; 0 means the amount that was found.

    Raises:
        BadInput: the options contradict each other, or no GPU has that name.
    """
    if cluster and own:
        raise BadInput(
            "--cluster and --calibrate: --calibrate can time only this machine, not a cluster",
            remedy="leave one of the two out",
        )
    named = find_gpu(name, table) if name not in ("", ANY) else None
    gpus, wanted, hosts = table, named, Hosts()
    if cluster:
        gpus, wanted, hosts = _of_the_cluster(config, table, wanted)
    elif own or not name:
        wanted = _this_machine(config, table, wanted) if own else _here(config, table)
        hosts = Hosts(memory={wanted.name: host_memory()}) if wanted else hosts
    if host_memory_gb:
        memory = dict.fromkeys((each.name for each in gpus), int(host_memory_gb * 10**9))
        hosts = replace(hosts, memory=memory)
    return gpus, wanted, hosts


def _of_the_cluster(
    config: RunConfig, table: Sequence[Gpu], wanted: Gpu | None
) -> tuple[Sequence[Gpu], Gpu | None, Hosts]:
    """Return the kinds of GPUs and MIG devices in the cluster, the wanted one, and its nodes."""
    from steadytrain.pipelines.cluster.nodes import cluster_hosts

    there, hosts, remarks = cluster_hosts(config, table)
    for remark in remarks:
        typer.echo(remark, err=True)
    if wanted is None:
        return there, None, hosts
    for gpu in there:
        if gpu.name == wanted.name:
            return there, gpu, hosts
    names = ", ".join(gpu.name for gpu in there)
    raise BadInput(
        f"--gpu {wanted.name}: the cluster has none",
        remedy=f"one of {names}, or leave --cluster out",
    )


def _here(config: RunConfig, gpus: Sequence[Gpu]) -> Gpu | None:
    """Return the device that `run` would train on; None if it would not, or on an unknown GPU."""
    compute, name = config.compute, device_name(config.compute)
    if name == CPU:
        local = compute.launcher in ("auto", "process") and compute.nodes == 1
        needs_cuda = compute.device == "cuda" or config.training.fp16 or config.only_cuda
        if not local or needs_cuda:
            return None
        return this_cpu(config)
    result = known_gpu(name, gpus)
    if result is None:
        typer.echo(f"this machine's {name} is not in the table; --gpu names another", err=True)
    return result


def _this_machine(config: RunConfig, gpus: Sequence[Gpu], named: Gpu | None) -> Gpu:
    """Return the device that this machine trains on, the only one that can be timed."""
    name = device_name(config.compute)
    device = this_cpu(config) if name == CPU else find_gpu(name, gpus)
    if named and named != device:
        raise BadInput(
            f"--gpu {named.name}: the GPU that --calibrate can time here is a {device.name}",
            remedy="leave one of the two out, or calibrate on a machine with that GPU",
        )
    return device

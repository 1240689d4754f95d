"""Which GPUs a plan is for: named ones, a cluster's, or this machine's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import typer

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.processes import host_memory
from steadytrain.components.sizing.hardware import (
    CPU,
    Gpu,
    PriceTable,
    device_name,
    find_gpu,
    known_gpu,
    own_prices,
    priced,
    priced_by,
    this_cpu,
)
from steadytrain.components.sizing.machine import Hosts

ANY: Final = "any"
"""Instead of a GPU's name, leaves the choice to the plan."""


class Hardware(NamedTuple):
    """What a plan chooses from.

    gpus: the kinds to choose from, with prices.
    wanted: the kind to plan for; None leaves the choice to the plan.
    hosts: what is known of the nodes.
    prices: where they are from.
    """

    gpus: Sequence[Gpu]
    wanted: Gpu | None
    hosts: Hosts
    prices: str


def choose_hardware(
    config: RunConfig,
    name: str = "",
    *,
    prices: PriceTable | None = None,
    cluster: bool = False,
    own: bool = False,
    host_memory_gb: float = 0,
) -> Hardware:
    """Return what a plan chooses from.

    Args:
        name: the GPU kind to plan for; ANY leaves it open, and "" means what `run` would train on
            here.
        prices: None means steadytrain's own.
        cluster: whether to plan for a cluster's GPUs.
        own: whether to plan for the device that this machine trains on.
        host_memory_gb: RAM of each node; 0 means the amount that was found.

    Raises:
        BadInput: the options contradict each other, or no GPU has that name.
    """
    table, core, origin = prices or own_prices()
    if cluster and own:
        raise BadInput(
            "--cluster and --calibrate: --calibrate can time only this machine, not a cluster",
            remedy="leave one of the two out",
        )
    named = find_gpu(name, table) if name not in ("", ANY) else None
    gpus: Sequence[Gpu] = table
    wanted, hosts = named, Hosts()
    if cluster:
        gpus, wanted, hosts = _of_the_cluster(config, table, wanted)
    elif own or not name:
        wanted = _this_machine(config, table, wanted, core) if own else _here(config, table, core)
        hosts = Hosts(memory={wanted.name: host_memory()}) if wanted else hosts
    if host_memory_gb:
        memory = dict.fromkeys((each.name for each in gpus), int(host_memory_gb * 10**9))
        hosts = replace(hosts, memory=memory)
    return Hardware(gpus, wanted, hosts, origin)


def price_table(prices: Path | None, provider: str) -> PriceTable:
    """Return the prices of a file, of a provider, or steadytrain's own.

    Raises:
        BadInput: both are given, or the file or the provider cannot be used.
    """
    if prices is not None and provider:
        raise BadInput("--prices and --provider: both give prices", remedy="leave one of them out")
    if prices is not None:
        return priced(prices)
    return priced_by(provider) if provider else own_prices()


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


def _here(config: RunConfig, gpus: Sequence[Gpu], core: float | None) -> Gpu | None:
    """Return the device that `run` would train on; None if it would not, or on an unknown GPU."""
    compute, name = config.compute, device_name(config.compute)
    if name == CPU:
        local = compute.launcher in ("auto", "process") and compute.nodes == 1
        needs_cuda = compute.device == "cuda" or config.training.fp16 or config.only_cuda
        if not local or needs_cuda:
            return None
        return this_cpu(config, core)
    result = known_gpu(name, gpus)
    if result is None:
        typer.echo(f"this machine's {name} is not in the table; --gpu names another", err=True)
    return result


def _this_machine(
    config: RunConfig, gpus: Sequence[Gpu], named: Gpu | None, core: float | None
) -> Gpu:
    """Return the device that this machine trains on, the only one that can be timed."""
    name = device_name(config.compute)
    device = this_cpu(config, core) if name == CPU else find_gpu(name, gpus)
    if named and named != device:
        raise BadInput(
            f"--gpu {named.name}: the GPU that --calibrate can time here is a {device.name}",
            remedy="leave one of the two out, or calibrate on a machine with that GPU",
        )
    return device

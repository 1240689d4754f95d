"""Which GPUs a plan is for: named, a cluster's, or this machine's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import typer

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.train.agent.memory import host_memory
from steadytrain.components.train.plan.device import CPU, device_name, this_cpu
from steadytrain.components.train.plan.hardware import Gpu, find_gpu, known_gpu
from steadytrain.components.train.plan.hosts import Hosts


def choose_hardware(
    config: RunConfig,
    table: Sequence[Gpu],
    name: str,
    *,
    cluster: bool,
    own: bool,
    host_memory_gb: float,
) -> tuple[Sequence[Gpu], Gpu | None, Hosts]:
    """The kinds to choose from, the one that is meant, and what is known of the nodes.

    Args:
        name: of a kind; "": this machine's, or open.
        cluster: whether they are those of a cluster.
        own: whether they are what this machine trains on.
        host_memory_gb: of each node; 0: as it is found.

    Raises:
        BadInput: these do not go together, or there is none of that name.
    """
    if cluster and own:
        raise BadInput(
            "--cluster and --calibrate: what can be timed is this machine, not a cluster's",
            remedy="leave one of the two out",
        )
    gpus, wanted, hosts = table, find_gpu(name, table) if name else None, Hosts()
    if cluster:
        gpus, hosts = _of_the_cluster(config, table, wanted)
    elif own or not name:
        wanted = _own(config, table, wanted) if own else _here(config, table)
        hosts = Hosts(memory={wanted.name: host_memory()}) if wanted else hosts
    if host_memory_gb:
        memory = dict.fromkeys((each.name for each in gpus), int(host_memory_gb * 10**9))
        hosts = replace(hosts, memory=memory)
    return gpus, wanted, hosts


def _of_the_cluster(
    config: RunConfig, gpus: Sequence[Gpu], wanted: Gpu | None
) -> tuple[Sequence[Gpu], Hosts]:
    """The kinds that it has, and its nodes."""
    from steadytrain.pipelines.cluster.hosts import cluster_hosts

    hosts, remarks = cluster_hosts(config, gpus)
    for remark in remarks:
        typer.echo(remark, err=True)
    there = [gpu for gpu in gpus if hosts.have(gpu.name, 1, 1)]
    if wanted and wanted not in there:
        names = ", ".join(gpu.name for gpu in there)
        raise BadInput(
            f"--gpu {wanted.name}: the cluster has none",
            remedy=f"one of {names}, or leave --cluster out",
        )
    return there, hosts


def _here(config: RunConfig, gpus: Sequence[Gpu]) -> Gpu | None:
    """This machine's GPU, if it has one that the table knows."""
    name = device_name(config.compute)
    if name == CPU:
        return None
    found = known_gpu(name, gpus)
    if found is None:
        typer.echo(f"this machine's {name} is not in the table; --gpu names another", err=True)
    return found


def _own(config: RunConfig, gpus: Sequence[Gpu], named: Gpu | None) -> Gpu:
    """What this machine trains on, which alone can be timed."""
    name = device_name(config.compute)
    own = this_cpu(config) if name == CPU else find_gpu(name, gpus)
    if named and named != own:
        raise BadInput(
            f"--gpu {named.name}: what --calibrate can time here is a {own.name}",
            remedy="leave one of the two out, or calibrate where that GPU is",
        )
    return own

"""`steadytrain plan`: what a training will take, before anything is allocated."""

from __future__ import annotations

import importlib.util
import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steadytrain.pipelines.options import Overrides, Source

if TYPE_CHECKING:
    from collections.abc import Sequence

    from steadytrain.components.shared.config import RunConfig
    from steadytrain.components.train.plan.fit import Choice, Measure
    from steadytrain.components.train.plan.hardware import Gpu
    from steadytrain.components.train.plan.hosts import Hosts
    from steadytrain.components.train.plan.memory import Memory


def plan(
    source: Source,
    overrides: Overrides = [],  # noqa: B006  typer copies it
    gpu: Annotated[
        str,
        typer.Option(help="Such as h100 or rtx4050; by default this machine's, else the cheapest."),
    ] = "",
    nodes: Annotated[int, typer.Option(min=0, help="By default compute.nodes.")] = 0,
    gpus_per_node: Annotated[
        int, typer.Option(min=0, help="A rank each; by default compute.nproc_per_node.")
    ] = 0,
    cluster: Annotated[
        bool,
        typer.Option(
            "--cluster",
            help="With the GPUs and the memory of the nodes of the cluster that kubectl would "
            "talk to.",
        ),
    ] = False,
    host_memory_gb: Annotated[
        float,
        typer.Option(
            min=0,
            help="Of each node's own memory, for offloading; by default the cluster's or, on its "
            "own GPU, this machine's, else not known.",
        ),
    ] = 0,
    prices: Annotated[
        Path | None,
        typer.Option(help="YAML of your prices, `H100: {usd_per_hour: 8, spot_usd_per_hour: 3}`."),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the filled-in configuration, and for the files that accelerate, "
            "DeepSpeed and Kubeflow Trainer would take."
        ),
    ] = None,
    by_formula: Annotated[
        bool,
        typer.Option("--formula", help="No dry run: the same at once, memory less exactly."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Tell what a training takes and why: memory, strategy, micro-batch, hours, cost, GPUs.

    From the model's configuration alone: no weights, and no network but with --cluster. By
    formula, and where torch is installed the memory of what is chosen by a dry run on fake
    tensors, which takes seconds. What you have set is never changed; what you left open is filled
    in, each with the rule it follows. What earlier runs in the same output have learned to fit
    takes the place of the formula's. Where it cannot work the plan says so, with the nearest that
    does, and ends with status 1.

    For example: `steadytrain plan chat --gpu rtx4050 --set model.base=hub:meta-llama/Llama-3.1-8B`

    Steps, hours and cost are known once the data are prepared (`steadytrain step preprocess FILE`)
    or training.max_steps is set. Above 100 billion parameters it refuses.
    """
    from steadytrain.components.train.agent.memory import host_memory
    from steadytrain.components.train.plan.hardware import all_gpus, find_gpu, priced
    from steadytrain.components.train.plan.hosts import Hosts
    from steadytrain.components.train.plan.plan import plan_training
    from steadytrain.components.train.plan.render import render

    config = _load(source, overrides, nodes, gpus_per_node)
    gpus: Sequence[Gpu] = all_gpus() if prices is None else priced(prices)
    wanted, hosts = find_gpu(gpu, gpus) if gpu else None, Hosts()
    if cluster:
        gpus, hosts = _of_the_cluster(config, gpus, wanted)
    elif not gpu and (wanted := _here(config, gpus)):
        hosts = Hosts(memory={wanted.name: host_memory()})
    if host_memory_gb:
        memory = dict.fromkeys((each.name for each in gpus), int(host_memory_gb * 10**9))
        hosts = replace(hosts, memory=memory)
    measure = None if by_formula else _measure(config)
    found = plan_training(config, gpus, wanted, hosts, measure=measure)
    typer.echo(json.dumps(found.as_data(), indent=2) if as_json else render(found))
    if write is not None:
        from steadytrain.components.train.plan.launch_files import write_files

        for path in write_files(found, write):
            typer.echo(f"wrote {path}", err=True)
    if not found.works:
        raise typer.Exit(1)


def _load(source: str, overrides: list[str], nodes: int, gpus_per_node: int) -> RunConfig:
    from steadytrain.components.shared.config import load

    sizes = (("compute.nodes", nodes), ("compute.nproc_per_node", gpus_per_node))
    return load(source, [*overrides, *(f"{field}={size}" for field, size in sizes if size)])


def _measure(config: RunConfig) -> Measure | None:
    """A dry run of a choice; None where torch is not installed."""
    from steadytrain.components.train.plan.architectures import architecture_of
    from steadytrain.components.train.plan.model import label_count

    if importlib.util.find_spec("torch") is None:
        return None

    def measure(choice: Choice) -> Memory:
        typer.echo("memory by a dry run on fake tensors; --formula leaves it out", err=True)
        from steadytrain.components.train.plan.dry_run import dry_run

        with warnings.catch_warnings(action="ignore"):
            return dry_run(
                architecture_of(config.model), choice.setting, labels=label_count(config)
            )

    return measure


def _of_the_cluster(
    config: RunConfig, gpus: Sequence[Gpu], wanted: Gpu | None
) -> tuple[Sequence[Gpu], Hosts]:
    """The kinds that it has, and its nodes."""
    from steadytrain.components.shared.errors import BadInput
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
    from steadytrain.components.shared.errors import BadInput
    from steadytrain.components.train.plan.device import CPU, device_name
    from steadytrain.components.train.plan.hardware import find_gpu

    name = device_name(config.compute)
    if name == CPU:
        return None
    try:
        return find_gpu(name, gpus)
    except BadInput:
        typer.echo(f"this machine's {name} is not in the table; --gpu names another", err=True)
        return None

"""`steadytrain plan`: what a training will take, before anything is allocated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steadytrain.pipelines.options import Overrides, Source

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from steadytrain.components.shared.config import RunConfig
    from steadytrain.components.train.plan.fit import Choice
    from steadytrain.components.train.plan.hardware import Gpu
    from steadytrain.components.train.plan.machine import Job
    from steadytrain.components.train.plan.time_cost import Speed


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
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Time a few real steps on this machine's GPU, or on its CPU where it has none or "
            "compute.device is cpu.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Tell what a training takes and why: memory, strategy, micro-batch, hours, cost, GPUs.

    By formula, from the model's configuration alone: no weights, no torch, no network. What you
    have set is never changed; what you left open is filled in, each with the rule it follows.
    Where it cannot work the plan says so, with the nearest that does, and ends with status 1.

    For example: `steadytrain plan chat --gpu rtx4050 --set model.base=hub:meta-llama/Llama-3.1-8B`

    With --calibrate the speed is measured, by about a minute of real steps of the real model with
    random weights at the most. Without a GPU it plans for this machine's CPU.

    Steps, hours and cost are known once the data are prepared (`steadytrain step preprocess FILE`)
    or training.max_steps is set. Above 100 billion parameters it refuses.
    """
    from steadytrain.components.train.plan.hardware import all_gpus, find_gpu, priced
    from steadytrain.components.train.plan.plan import plan_training
    from steadytrain.components.train.plan.render import render
    from steadytrain.components.train.plan.time_cost import by_table

    config = _load(source, overrides, nodes, gpus_per_node)
    gpus = all_gpus() if prices is None else priced(prices)
    named = find_gpu(gpu, gpus) if gpu else None
    wanted = _own(config, gpus, named) if calibrate else named or _here(config, gpus)
    timed = _on_this_machine() if calibrate else by_table
    found = plan_training(config, gpus, wanted, timed=timed)
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


def _own(config: RunConfig, gpus: Sequence[Gpu], named: Gpu | None) -> Gpu:
    """What this machine trains on, which alone can be timed."""
    from steadytrain.components.shared.errors import BadInput
    from steadytrain.components.train.plan.device import CPU, device_name, this_cpu
    from steadytrain.components.train.plan.hardware import find_gpu

    name = device_name(config.compute)
    own = this_cpu(config) if name == CPU else find_gpu(name, gpus)
    if named and named != own:
        raise BadInput(
            f"--gpu {named.name}: what --calibrate can time here is a {own.name}",
            remedy="leave one of the two out, or calibrate where that GPU is",
        )
    return own


def _on_this_machine() -> Callable[[Job, Choice], Speed]:
    from functools import partial

    from steadytrain.components.train.plan.calibration import calibrate

    return partial(calibrate, tell=partial(typer.echo, err=True))

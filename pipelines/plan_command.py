"""`steadytrain plan`: what a training will take, before anything is allocated."""

from __future__ import annotations

import importlib.util
import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steadytrain.pipelines.options import Overrides, Source, at_most

if TYPE_CHECKING:
    from steadytrain.components.shared.config import RunConfig
    from steadytrain.components.train.plan.fit import Choice, Measure
    from steadytrain.components.train.plan.memory import Memory
    from steadytrain.components.train.plan.time_cost import Timing

_LARGEST_MEMORY_GB = 1e6


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
            callback=at_most(_LARGEST_MEMORY_GB),
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
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Time a few real steps on this machine's GPU, or on its CPU where it has none or "
            "compute.device is cpu.",
        ),
    ] = False,
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

    With --calibrate the speed is measured, by about a minute of real steps of the real model with
    random weights at the most. Without a GPU it plans for this machine's CPU.

    Steps, hours and cost are known once the data are prepared (`steadytrain step preprocess FILE`)
    or training.max_steps is set. Above 100 billion parameters it refuses.
    """
    from steadytrain.components.train.plan.hardware import all_gpus, priced
    from steadytrain.components.train.plan.plan import plan_training
    from steadytrain.components.train.plan.render import render
    from steadytrain.components.train.plan.time_cost import by_table
    from steadytrain.pipelines.plan_hardware import choose_hardware

    config = _load(source, overrides, nodes, gpus_per_node)
    table = all_gpus() if prices is None else priced(prices)
    gpus, wanted, hosts = choose_hardware(
        config, table, gpu, cluster=cluster, own=calibrate, host_memory_gb=host_memory_gb
    )
    found = plan_training(
        config,
        gpus,
        wanted,
        hosts,
        measure=None if by_formula else _measure(config),
        timed=_on_this_machine() if calibrate else by_table,
    )
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


def _on_this_machine() -> Timing:
    """A calibration."""
    from functools import partial

    from steadytrain.components.train.plan.calibration import calibrate

    return partial(calibrate, tell=partial(typer.echo, err=True))

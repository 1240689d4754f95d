"""`steadytrain plan` and `profile`: what training needs, and where the time of its steps goes."""

from __future__ import annotations

import importlib.util
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from steadytrain.components.shared.digest import value_digest
from steadytrain.pipelines import options
from steadytrain.pipelines.options import (
    LARGEST_GB,
    DataSource,
    Json,
    Overrides,
    Run,
    RunOutput,
    TokensPerSecond,
    at_most,
    check_extra,
    check_reads_texts,
    refuse_unread,
    with_options,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from steadytrain.components.memory.peak import Memory
    from steadytrain.components.plan.design import Storage
    from steadytrain.components.plan.networks import NetworkPlan
    from steadytrain.components.plan.series import SeriesPlan
    from steadytrain.components.plan.tables import TablePlan
    from steadytrain.components.shared.config import RunConfig
    from steadytrain.components.shared.workspace import Workspace
    from steadytrain.components.sizing.fit import Choice, Measure
    from steadytrain.components.sizing.hardware import Gpu
    from steadytrain.components.sizing.time_cost import Timing


def plan(
    source: DataSource,
    overrides: Overrides = [],  # noqa: B006  typer copies it
    run: Run = None,
    output: RunOutput = None,
    gpu: Annotated[
        str,
        typer.Option(
            help="GPU to plan for, such as h100 or rtx4050, or `any` for the cheapest that works. "
            "Default: what `run` would train on here, this machine's GPU or its CPU."
        ),
    ] = "",
    nodes: Annotated[int, typer.Option(min=0, help="Number of nodes. Default: compute.nodes.")] = 0,
    gpus_per_node: Annotated[
        int,
        typer.Option(
            min=0, help="GPUs per node, with one rank each. Default: compute.nproc_per_node."
        ),
    ] = 0,
    cluster: Annotated[
        bool,
        typer.Option(
            "--cluster",
            help="Plan for the GPUs and the memory of the nodes in the cluster that kubectl "
            "connects to.",
        ),
    ] = False,
    host_memory_gb: Annotated[
        float,
        typer.Option(
            min=0,
            callback=at_most(LARGEST_GB),
            help="Host memory of each node in GB, for offloading. Default: the cluster's with "
            "--cluster, this machine's if the plan is for its own GPU, otherwise unknown.",
        ),
    ] = 0,
    prices: Annotated[
        Path | None,
        typer.Option(
            help="YAML file with your own prices, such as `H100: {usd_per_hour: 8, "
            "spot_usd_per_hour: 3}`. It replaces all built-in prices."
        ),
    ] = None,
    provider: Annotated[
        str,
        typer.Option(
            help="Provider whose list prices to use: aws, gcp, azure, lambda, runpod or modal. "
            "The plan says when they were checked. GPUs without a price there are not compared."
        ),
    ] = "",
    tokens_per_second: TokensPerSecond = 0,
    write: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write the filled-in configuration to, with the equivalent files for "
            "accelerate, DeepSpeed and Kubeflow Trainer."
        ),
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Time a few real steps on this machine's GPU, or on its CPU if it has no GPU or "
            "compute.device is cpu.",
        ),
    ] = False,
    by_formula: Annotated[
        bool,
        typer.Option(
            "--formula", help="Skip the dry run. This is faster, but the memory is less exact."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Show what a training run needs, and why.

    That is memory, strategy, micro-batch, hours, cost and GPUs. The plan needs only the model's
    configuration: no weights, and no network unless you pass --cluster. It is computed by formula.
    If torch is installed, a dry run on fake tensors determines the memory of the chosen setup,
    which takes seconds. What you set is never changed. What you left open is filled in, each field
    with the rule behind it. If an earlier run in the same output found out what fits, the plan uses
    that instead of the formula. If the configuration cannot work, the plan says so, shows the
    nearest one that does, and exits with status 1.

    For example: `steadytrain plan chat --gpu rtx4050 --set model.base=hub:meta-llama/Llama-3.1-8B`

    With --calibrate, the speed is measured with real steps of the real model with random weights,
    for about a minute at most. Without a GPU, it plans for this machine's CPU.

    Steps, hours and cost come from the prepared data or, before `steadytrain step preprocess FILE`,
    from the first records of files on this machine. Models above 100 billion parameters are an
    error. For a table, the plan shows its columns, its matrix and the threads. For
    images, mixed records and time series, it needs torch and, before that step, prepares up to
    134 MB of the data itself, in a folder that it removes.
    """
    check_extra("data", "steadytrain plan")
    from steadytrain.components.plan.design import cost_estimate, given_by, storage_of_plan
    from steadytrain.components.plan.plan import plan_training
    from steadytrain.components.plan.render import render
    from steadytrain.components.shared.config.data_sections import IMAGES, MULTIMODAL, SERIES
    from steadytrain.components.sizing.time_cost import by_table
    from steadytrain.components.tasks.base import load_task
    from steadytrain.pipelines.early_checks import check_plugins
    from steadytrain.pipelines.plan_hardware import ANY, choose_hardware
    from steadytrain.pipelines.sources import open_source

    sizes = {"compute.nodes": nodes, "compute.nproc_per_node": gpus_per_node}
    chosen = open_source(source, with_options(overrides, run=run, output=output, **sizes))
    for remark in chosen.remarks:
        typer.echo(remark, err=True)
    config = chosen.config
    check_plugins(config)
    check_reads_texts(config, tokens_per_second)
    given = {
        "--gpu": gpu,
        "--nodes": nodes,
        "--gpus-per-node": gpus_per_node,
        "--cluster": cluster,
        "--host-memory-gb": host_memory_gb,
        "--prices": prices,
        "--provider": provider,
        "--write": write,
        "--calibrate": calibrate,
        "--formula": by_formula,
    }
    if load_task(config.data.task).tabular:
        refuse_unread(given, f"{config.data.task} trains in one process on a CPU")
        _show_table_plan(config, as_json=as_json)
        return
    unread = f"a plan for {config.data.task} does not have it"
    if config.data.task in SERIES:
        refuse_unread(given, unread, reads=("--calibrate",))
        _show_series_plan(config, calibrate=calibrate, as_json=as_json)
        return
    table, origin = priced_table(prices, provider)
    gpus, wanted, hosts = choose_hardware(
        config, table, gpu, cluster=cluster, own=calibrate, host_memory_gb=host_memory_gb
    )
    if wanted is not None and not wanted.cuda and not calibrate:
        message = f"`run` would train on this machine's CPU; --gpu {ANY} plans for the cheapest GPU"
        typer.echo(message, err=True)
    if config.data.task in (*IMAGES, *MULTIMODAL):
        chosen_by = "--gpu", "--nodes", "--gpus-per-node", "--prices", "--provider"
        refuse_unread(given, unread, reads=(*chosen_by, "--calibrate"))
        _show_network_plan(config, gpus, wanted, origin, calibrate=calibrate, as_json=as_json)
        return
    planned = plan_training(
        config,
        gpus,
        wanted,
        hosts,
        measure=None if by_formula else _measure(config),
        timed=_on_this_machine() if calibrate else by_table,
        prices=origin,
    )
    if as_json:
        from steadytrain.components.plan.design import design_of_plan, training_pods
        from steadytrain.components.plan.render import filled
        from steadytrain.pipelines.design import pipeline_config

        pods = training_pods(filled(planned), planned.job.machine.gpu.name)
        design = design_of_plan(planned, pipeline_config(config, pods), given_by(config))
        options.show(planned.as_data() | design.serving(tokens_per_second).parts())
    else:
        space = storage_of_plan(planned, given_by(config))
        cost = cost_estimate(planned).serving(tokens_per_second)
        typer.echo("\n".join([render(planned), "", space.line(), *cost.inference_lines()]))
    if write is not None:
        from steadytrain.components.plan.render import write_files

        for path in write_files(planned, write):
            typer.echo(f"wrote {path}", err=True)
    if not planned.works:
        raise typer.Exit(1)


def priced_table(prices: Path | None, provider: str) -> tuple[tuple[Gpu, ...], str]:
    """Return the table of GPUs with the prices that were asked for, and where those are from.

    Raises:
        BadInput: both are given, or one cannot be used.
    """
    from steadytrain.components.plan.plan import OWN_PRICES
    from steadytrain.components.shared.errors import BadInput
    from steadytrain.components.sizing.hardware import all_gpus, priced, priced_by

    if prices is not None and provider:
        raise BadInput("--prices and --provider: both give prices", remedy="leave one of them out")
    if prices is not None:
        return priced(prices), str(prices)
    return priced_by(provider) if provider else (all_gpus(), OWN_PRICES)


def _show_table_plan(config: RunConfig, *, as_json: bool) -> None:
    """Show the plan of a run that learns from a table."""
    from steadytrain.components.plan.design import design_of_table, given_by, storage_of
    from steadytrain.components.plan.tables import plan_table

    planned, given = plan_table(config), given_by(config)
    if not as_json:
        _print(planned, storage_of(config, given, None, None))
        return
    from steadytrain.pipelines.design import pipeline_config

    design = design_of_table(planned, config, pipeline_config(config, None), given)
    options.show(planned.as_data() | design.parts())


def _show_series_plan(config: RunConfig, *, calibrate: bool, as_json: bool) -> None:
    """Show the plan of a run that forecasts time series.

    Args:
        calibrate: whether to time real steps.
    """
    check_extra("train", "steadytrain plan")
    from steadytrain.components.plan.design import design_of_series, given_by, storage_of
    from steadytrain.components.plan.series import plan_series

    planned, given = plan_series(config, calibrate=calibrate), given_by(config)
    if not as_json:
        weights = planned.parameters or None
        _print(planned, storage_of(config, given, weights, weights))
        return
    from steadytrain.pipelines.design import pipeline_of_series

    design = design_of_series(planned, config, pipeline_of_series(config, planned), given)
    options.show(planned.as_data() | design.parts())


def _show_network_plan(
    config: RunConfig,
    gpus: Sequence[Gpu],
    wanted: Gpu | None,
    prices: str,
    *,
    calibrate: bool,
    as_json: bool,
) -> None:
    """Show the plan of a network that learns from images or mixed records.

    Args:
        prices: where those of GPUs are from.
        calibrate: whether to time real steps.
    """
    check_extra("train", "steadytrain plan")
    from steadytrain.components.plan.design import (
        design_of_network,
        given_by,
        storage_of,
        training_pods,
    )
    from steadytrain.components.plan.networks import plan_network

    planned, given = (
        plan_network(config, gpus, wanted, calibrate=calibrate),
        given_by(config, prices),
    )
    if as_json:
        from steadytrain.pipelines.design import pipeline_config

        pipeline = pipeline_config(config, training_pods(config, planned.device))
        design = design_of_network(planned, config, pipeline, given)
        options.show(planned.as_data() | design.parts())
    else:
        _print(planned, storage_of(config, given, planned.trained, planned.parameters))
    if not planned.works:
        raise typer.Exit(1)


def _print(found: TablePlan | SeriesPlan | NetworkPlan, space: Storage) -> None:
    typer.echo("\n".join([*found.lines(), space.line()]))


def _measure(config: RunConfig) -> Measure | None:
    """Return a function that measures a choice with a dry run; None if torch is not installed."""
    from steadytrain.components.memory.model import any_model_shape, architecture_of, label_count

    if importlib.util.find_spec("torch") is None:
        return None

    def measure(choice: Choice) -> Memory:
        typer.echo("memory by a dry run on fake tensors; --formula leaves it out", err=True)
        from steadytrain.components.plan.calibration import dry_run

        with warnings.catch_warnings(action="ignore"):
            return dry_run(
                architecture_of(config.model),
                choice.setting,
                labels=label_count(config),
                shape=any_model_shape(config),
            )

    return measure


def _on_this_machine() -> Timing:
    """Return a timing that calibrates on this machine."""
    from functools import partial

    from steadytrain.components.plan.calibration import calibrate

    return partial(calibrate, notify=partial(typer.echo, err=True))


_WARM_UP: Final = 10
_RECORDED: Final = 5
_LONGEST: Final = 44
"""Longest name of a run for which the name of its profile is valid."""


def profile_name(run: str) -> str:
    """Return the name of the run that profiles another. Long names are shortened, not merged."""
    if len(run) > _LONGEST:
        digest = value_digest(run)[:8]
        run = f"{run[: _LONGEST - len(digest) - 1]}-{digest}"
    return f"{run}-profile"


def profile(
    source: DataSource = "causal-lm",
    overrides: Overrides = [],  # noqa: B006  typer copies it
    name: Run = None,
    output: RunOutput = None,
    warm_up: Annotated[
        int, typer.Option(min=1, help="Steps before those that are recorded.")
    ] = _WARM_UP,
    steps: Annotated[
        int, typer.Option(min=1, max=100, help="Steps that are recorded.")
    ] = _RECORDED,
    as_json: Json = False,
) -> None:
    """Profile a few training steps on this machine, and say what to change first.

    Prepares the data and trains for 15 steps as a run of its own, RUN-profile, on every rank. No
    model is evaluated or registered. Shows in ten lines where the time goes, and the three changes
    with the largest expected gain. The folder profile of that run has a Chrome trace for each
    rank and, on GPUs, a snapshot of the memory for pytorch.org/memory_viz.
    """
    check_extra("train", "steadytrain profile")
    from steadytrain.components.observe.profile import Profile
    from steadytrain.components.preprocess.step import run as prepare
    from steadytrain.components.shared.config import load
    from steadytrain.components.shared.errors import Stopped, TrainingFailed
    from steadytrain.components.shared.workspace import Workspace
    from steadytrain.components.train.step import check_complete
    from steadytrain.components.train.step import run as train
    from steadytrain.pipelines.early_checks import check_plugins
    from steadytrain.pipelines.local import print_line
    from steadytrain.pipelines.runs import run_lock
    from steadytrain.pipelines.sources import open_source

    chosen = open_source(source, with_options(overrides, run=name, output=output)).config
    last = warm_up + steps
    settings = {
        "run": profile_name(chosen.run_id),
        "training.max_steps": last,
        "training.profile.steps": [warm_up + 1, last],
        "training.logging_steps": 1,
        "training.eval_steps": last,
        "training.save_steps": last,
        "recovery.checkpoints": None,
    }
    config = load(chosen.to_yaml(), settings)
    check_plugins(config)
    workspace = Workspace.of(config)
    workspace.create()
    try:
        with run_lock(workspace):
            _remove_profile(workspace)
            outcome = train(config, prepare(config))
        if outcome.failure is not None:
            failure = outcome.failure
            raise TrainingFailed(
                failure.message, failure_class=failure.failure_class, remedy=failure.remedy
            )
        check_complete(outcome)
    except Stopped:
        print_line("stopped before the profile was complete; the same command starts it again")
        raise
    measured = Profile.of(config)
    if as_json:
        changes = [{"change": item.text, "gain": item.gain} for item in measured.changes()]
        folder = str(measured.folder)
        options.show({"shares": measured.shares(), "changes": changes, "folder": folder})
    else:
        typer.echo("\n".join(measured.lines()))


def _remove_profile(workspace: Workspace) -> None:
    """Remove an earlier profile, which would count as the trained part of this run.

    Raises:
        BadInput: there is a run of that name that is not a profile.
    """
    from steadytrain.components.shared.config import load
    from steadytrain.components.shared.errors import BadInput

    known = workspace.config.exists()
    if known and load(workspace.config).training.profile.steps is None:
        raise BadInput(
            f"run {workspace.run_id!r} exists and is not a profile",
            remedy="give this profile another name with --run",
        )
    shutil.rmtree(workspace.folder)

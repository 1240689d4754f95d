"""`steadytrain plan` and `profile`: what training needs, and where the time of its steps goes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from steadytrain.components.shared.digest import value_digest
from steadytrain.pipelines import options
from steadytrain.pipelines.options import (
    BudgetUsd,
    DataSource,
    Json,
    Overrides,
    Prices,
    Provider,
    Run,
    RunOutput,
    TokensPerSecond,
    amount,
    check_extra,
    gigabytes,
    keeps_source,
    with_options,
    write_files,
)

if TYPE_CHECKING:
    from steadytrain.components.shared.workspace import Workspace


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
    nodes: Annotated[int, amount("Number of nodes. Default: compute.nodes.", 1e5)] = 0,
    gpus_per_node: Annotated[
        int,
        amount("GPUs per node, with one rank each. Default: compute.nproc_per_node.", 1e5),
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
        gigabytes(
            "Host memory of each node in GB, for offloading. Default: the cluster's with "
            "--cluster, this machine's if the plan is for its own GPU, otherwise unknown."
        ),
    ] = 0,
    budget_usd: BudgetUsd = 0,
    prices: Prices = None,
    provider: Provider = "",
    tokens_per_second: TokensPerSecond = 0,
    write: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Folder to write the filled-in configuration to, with the arguments for "
            "Transformers' Trainer and, for models of texts, the files for accelerate, DeepSpeed "
            "and Kubeflow Trainer.",
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
            "--formula",
            help="Skip the dry run. This is faster, but the memory is less exact. Of tables and "
            "series, it times no step.",
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
    that instead of the formula. If the configuration cannot work, or costs more than the budget,
    the plan says so, shows the nearest one that does, and exits with status 1.

    For example: `steadytrain plan chat --gpu rtx4050 --set model.base=hub:meta-llama/Llama-3.1-8B`

    With --calibrate, the speed is measured with real steps of the real model with random weights,
    for about a minute at most. Without a GPU, it plans for this machine's CPU.

    Steps, hours and cost come from the prepared data or, before `steadytrain step preprocess FILE`,
    from the first records of files on this machine. Models above 100 billion parameters are an
    error. For a table, the plan shows its columns, its matrix and the threads; where the time
    of its model or of series has no formula, it times a step on this machine. For images, mixed
    records and time series, it needs torch and, before that step, prepares up to
    134 MB of the data itself, in a folder that it removes.
    """
    check_extra("data", "steadytrain plan")
    from steadytrain.components.plan.design import Resources, source_bytes
    from steadytrain.pipelines.early_checks import check_plugins
    from steadytrain.pipelines.plan_hardware import (
        ANY,
        Hardware,
        choose_hardware,
        price_table,
    )
    from steadytrain.pipelines.planners import planned
    from steadytrain.pipelines.sources import open_source

    keeps_source(source, write)
    stated = {
        "compute.nodes": nodes,
        "compute.nproc_per_node": gpus_per_node,
        "compute.budget_usd": budget_usd,
    }
    chosen = open_source(source, with_options(overrides, run=run, output=output, **stated))
    for remark in chosen.remarks:
        typer.echo(remark, err=True)
    config = chosen.config
    check_plugins(config)
    table = price_table(prices, provider)

    def hardware() -> Hardware:
        found = choose_hardware(
            config,
            gpu,
            prices=table,
            cluster=cluster,
            own=calibrate,
            host_memory_gb=host_memory_gb,
        )
        if found.wanted is not None and not found.wanted.cuda and not calibrate:
            other = f"--gpu {ANY} plans for the cheapest GPU"
            typer.echo(f"`run` would train on this machine's CPU; {other}", err=True)
        return found

    given = {
        "--gpu": gpu,
        "--nodes": nodes,
        "--gpus-per-node": gpus_per_node,
        "--cluster": cluster,
        "--host-memory-gb": host_memory_gb,
        "--prices": prices,
        "--provider": provider,
        "--tokens-per-second": tokens_per_second,
        "--write": write,
        "--calibrate": calibrate,
        "--formula": by_formula,
    }
    found = planned(
        config,
        hardware,
        command="steadytrain plan",
        given=given,
        prices=table,
        calibrate=calibrate,
        hours=not by_formula,
        dry_run=not by_formula,
    )
    known = Resources(source_bytes(config))
    design = found.design(known) if as_json or found.leaves_budget else None
    problems = design.problems if design and found.leaves_budget else ()
    if design and as_json:
        options.show(found.plan.as_data() | design.serving(tokens_per_second).parts())
    else:
        typer.echo("\n".join(found.lines(known, tokens_per_second)))
        for problem in problems:
            typer.echo(f"  problem {problem}")
    if write is not None:
        write_files(write, found.files())
    if not found.plan.works or problems:
        raise typer.Exit(1)


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

"""`steadytrain design`: pipeline, distribution and cost for a task, from a few answers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from steadytrain.components.shared.errors import BadInput
from steadytrain.components.sizing.batch import nodes_for
from steadytrain.pipelines import options
from steadytrain.pipelines.options import (
    BudgetUsd,
    GpuCount,
    Json,
    Overrides,
    Prices,
    Provider,
    RunOutput,
    TokensPerSecond,
    check_extra,
    gigabytes,
    keeps_source,
    refuse_unread,
    with_options,
    write_files,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from steadytrain.components.shared.config.load import Override
    from steadytrain.pipelines.sources import Selection

_MODEL_TYPES: Final = {
    "tabular": "tabular_classification",
    "cv": "image_classification",
    "nlp": "sequence_classification",
    "text_classification": "sequence_classification",
    "multimodal": "multimodal_classification",
    "timeseries": "forecasting",
}
"""The task that a general name stands for."""


def design(
    source: Annotated[
        str,
        typer.Argument(
            metavar="[FILE]", help="A preset, YAML file or data. Default: the preset of --task."
        ),
    ] = "",
    overrides: Overrides = [],  # noqa: B006  typer copies it
    output: RunOutput = None,
    task: Annotated[
        str,
        typer.Option(
            help="A data.task, or a kind of model: tabular, cv, nlp (or text_classification), "
            "multimodal or timeseries."
        ),
    ] = "",
    framework: Annotated[
        str, typer.Option(help="model.framework, such as pytorch, xgboost, lightgbm or sklearn.")
    ] = "",
    data: Annotated[str, typer.Option(help="Your data: the first data.source.")] = "",
    data_gb: Annotated[
        float,
        gigabytes(
            "Size of all data in GB, if the files of --data are a sample, or are not on this "
            "machine."
        ),
    ] = 0,
    gpu_type: Annotated[
        str, typer.Option(help="GPU, such as t4, v100, a100 or h100. Default: the plan chooses.")
    ] = "",
    gpu_count: GpuCount = 0,
    memory_gb: Annotated[float, gigabytes("Host memory of each node. Default: unknown.")] = 0,
    storage_gb: Annotated[float, gigabytes("Disk space for the run. Default: unknown.")] = 0,
    budget_usd: BudgetUsd = 0,
    prices: Prices = None,
    provider: Provider = "",
    tokens_per_second: TokensPerSecond = 0,
    write: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Folder to write to: design.json, the completed steadytrain.yaml, pipeline.yaml, "
            "schedules.yaml, and the files and scripts of other launchers.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Design a pipeline: its steps, how ranks share the work, and what it costs.

    It answers with pipeline_config, distributed_config and cost_estimate. `steadytrain schema
    --design` has their fields. Everything is by formula; where the time of a table or series has
    none, a step of it is timed on this machine. `steadytrain plan` explains each choice. If the
    design cannot work, or costs more than the budget, it says so and exits with status 1.

    For example: `steadytrain design chat --gpu-type a100 --gpu-count 8 --budget-usd 500`
    """
    check_extra("data", "steadytrain design")
    from steadytrain.components.plan.design import Resources, scripts, source_bytes
    from steadytrain.components.shared.config.data_sections import TABLES
    from steadytrain.pipelines.early_checks import check_plugins
    from steadytrain.pipelines.plan_hardware import ANY, choose_hardware, price_table
    from steadytrain.pipelines.planners import planned

    keeps_source(source, write)
    nodes, per_node = nodes_for(gpu_count)
    given: list[Override] = [*overrides]
    if framework:
        given.append(("model.framework", framework))
        # For another task, the framework is what is wrong, and the error says so.
        if framework in _BOOSTED and (not task or _MODEL_TYPES.get(task, task) in TABLES):
            given.append(("model.config.model_type", framework))
    if data:
        given.append(("data.source", [data]))
    stated = {
        "compute.nodes": nodes,
        "compute.nproc_per_node": per_node,
        "compute.budget_usd": budget_usd,
    }
    config = _open(source, task, with_options(given, output=output, **stated)).config
    check_plugins(config)
    on_cpu = config.compute.device == "cpu"
    if on_cpu:
        gpus = {"--gpu-type": gpu_type, "--gpu-count": gpu_count}
        refuse_unread(gpus, "compute.device is cpu, so that no GPU trains")
    table = price_table(prices, provider)
    given_bytes = int(data_gb * 1e9) or None
    try:
        found = planned(
            config,
            lambda: choose_hardware(
                config,
                gpu_type or ("" if on_cpu else ANY),
                prices=table,
                host_memory_gb=memory_gb,
            ),
            command="steadytrain design",
            given={
                "--gpu-type": gpu_type,
                "--prices": prices,
                "--provider": provider,
                "--tokens-per-second": tokens_per_second,
            },
            prices=table,
            data_bytes=given_bytes,
            hours=True,
        )
    except BadInput as error:
        if source or data or not error.message.startswith("data.source"):
            raise
        remedy = f"name your data with --data, such as --data my.csv; or {error.remedy}"
        raise BadInput(error.message, remedy=remedy) from error
    host, disk = int(memory_gb * 1e9) or None, int(storage_gb * 1e9) or None
    estimate = found.design(Resources(given_bytes or source_bytes(config), host, disk))
    estimate = estimate.serving(tokens_per_second)
    options.show(estimate.model_dump(mode="json")) if as_json else typer.echo(
        "\n".join(estimate.lines())
    )
    if write is not None:
        from steadytrain.pipelines.compile import pipeline_text
        from steadytrain.pipelines.design import SCHEDULES, schedules

        content = {
            **found.files(),
            **scripts(estimate.distributed_config),
            SCHEDULES: schedules(config),
            "design.json": estimate.model_dump_json(indent=2) + "\n",
            "pipeline.yaml": pipeline_text(),
        }
        write_files(write, content)
    if not estimate.works:
        raise typer.Exit(1)


_BOOSTED: Final = ("xgboost", "lightgbm", "catboost")
"""Frameworks with one kind of model, of the same name."""


def _open(source: str, task: str, overrides: Sequence[Override]) -> Selection:
    """Return the configuration of a file, or that of the first preset with the task.

    Raises:
        BadInput: neither is given, or there is no such preset.
    """
    from steadytrain.components.shared.config import load, preset_names
    from steadytrain.components.shared.config.data_sections import TABLES
    from steadytrain.pipelines.sources import PRESETS, open_source

    name = _MODEL_TYPES.get(task, task)
    if name != task:
        typer.echo(f"--task {task} stands for data.task {name}", err=True)
    if source:
        return open_source(source, [*overrides, *([("data.task", name)] if task else [])])
    if not task:
        raise BadInput(
            "design needs a configuration or a task", remedy="name a FILE, or give --task"
        )
    tasks = {preset: load(preset).data.task for preset in reversed(preset_names())}
    presets = {of: preset for preset, of in tasks.items()} | PRESETS
    presets |= dict.fromkeys(TABLES, presets[TABLES[0]])
    if name not in presets:
        raise BadInput(
            f"--task {task}: no preset has it",
            remedy=f"one of {', '.join([*_MODEL_TYPES, *sorted(presets)])}, or name a FILE",
        )
    return open_source(presets[name], [*overrides, ("data.task", name)])

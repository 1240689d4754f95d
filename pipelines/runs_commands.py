"""The commands that look at runs or stop one: list, stop, report, compare."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steadytrain.components.shared.errors import BadInput, RunBusy
from steadytrain.components.shared.written import write_asked
from steadytrain.pipelines import json_output
from steadytrain.pipelines.json_output import Json
from steadytrain.pipelines.options import DEFAULT_OUTPUT, YEAR, Output, RunName, at_most


def list_(output: Output = DEFAULT_OUTPUT, as_json: Json = False) -> None:
    """List the runs in an output folder."""
    from rich.console import Console
    from rich.table import Table

    from steadytrain.components.shared.quantities import moment
    from steadytrain.pipelines.runs import list_runs

    runs = list(list_runs(output))
    if as_json:
        json_output.show({"runs": [item.as_data() for item in runs]})
        return
    table = Table("run", "state", "step", "started", box=None, pad_edge=False)
    for item in runs:
        started = moment(item.started) if item.started else ""
        table.add_row(item.run_id, item.state, item.step, started)
    if not table.row_count:
        typer.echo(f"no runs in {output}")
        return
    Console().print(table)
    for item in runs:
        for problem in item.damage:
            typer.echo(f"{item.run_id}: {problem}")


def stop(
    name: RunName,
    output: Output = DEFAULT_OUTPUT,
    grace: Annotated[
        float,
        typer.Option(min=0, callback=at_most(YEAR), help="Seconds to wait for the run to stop."),
    ] = 60,
    as_json: Json = False,
) -> None:
    """Stop a run on this machine. It saves a checkpoint, and you can continue it later."""
    from steadytrain.pipelines.local import stop_run
    from steadytrain.pipelines.outline import resume_command
    from steadytrain.pipelines.runs import find_workspace

    workspace = find_workspace(output, name)
    stopped, again = stop_run(workspace, grace_seconds=grace), resume_command(workspace)
    if as_json:
        json_output.show({"run": name, "stopped": stopped, "next": again})
    elif stopped:
        typer.echo(f"stopped {name}; continue it with {again}")
    else:
        typer.echo(f"{name} is not running")


def report(name: RunName, output: Output = DEFAULT_OUTPUT, as_json: Json = False) -> None:
    """Write the HTML report of a run again, and summarize it."""
    from steadytrain.components.report.step import run as write_report
    from steadytrain.components.report.step import write_page
    from steadytrain.components.report.summary import as_data, summary
    from steadytrain.pipelines.lock import run_lock
    from steadytrain.pipelines.runs import find_run, is_running

    config, workspace = find_run(output, name)
    running = is_running(workspace)
    try:
        with run_lock(workspace):
            write_report(config)
    except RunBusy:
        write_page(workspace, running=True)
    if as_json:
        json_output.show(as_data(workspace, running=running))
    else:
        lines = summary(workspace, running=running)
        typer.echo("\n".join([*lines, f"report: {workspace.report}"]))


def compare(
    first: RunName,
    second: RunName,
    output: Output = DEFAULT_OUTPUT,
    html: Annotated[Path | None, typer.Option(help="Also write an HTML page to this file.")] = None,
    as_json: Json = False,
) -> None:
    """Show what differs between two runs, and whether one model is better.

    Compares configuration, data, code, environment, metrics by step, time, tokens and cost. If both
    runs were evaluated on the same test records, a paired bootstrap shows whether the difference in
    each metric is real.
    """
    from steadytrain.components.report.compare.comparison import compare as compare_runs
    from steadytrain.components.report.compare.comparison_page import render
    from steadytrain.components.report.compare.text import lines
    from steadytrain.components.report.facts import gather
    from steadytrain.pipelines.runs import find_run

    if first == second:
        raise BadInput(f"{first!r} is given twice", remedy="give the names of two runs")
    (config, workspace), (_, other) = find_run(output, first), find_run(output, second)
    found = compare_runs(gather(workspace), gather(other), config)
    if html is not None:
        write_asked(html, render(found).encode(), "--html")
    if as_json:
        json_output.show({**found.as_data(), "page": str(html) if html else None})
    else:
        typer.echo("\n".join([*lines(found), *([f"page: {html}"] if html else [])]))

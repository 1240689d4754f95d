"""Commands about runs: run, resume, list, stop, adjust, report, compare, explain, gc, top, ui."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from steadytrain.components.shared.errors import BadInput, RunBusy, Stopped
from steadytrain.components.shared.storage.local import write_requested
from steadytrain.pipelines import options
from steadytrain.pipelines.options import (
    DEFAULT_OUTPUT,
    YEAR,
    DataSource,
    Json,
    Output,
    Overrides,
    Place,
    Run,
    RunName,
    RunOutput,
    at_most,
    check_extra,
    with_options,
)

if TYPE_CHECKING:
    from steadytrain.components.shared.config import RunConfig
    from steadytrain.components.shared.workspace import Workspace


def run(
    source: DataSource = "causal-lm",
    overrides: Overrides = [],  # noqa: B006  typer copies it
    name: Run = None,
    output: RunOutput = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what the run would do, and exit.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run the pipeline on this machine, or continue a stopped run.

    The same configuration continues the same run. Completed work is not repeated.

    For data (a file, a folder, a glob, s3://, hub:NAME or package:NAME), a look at the first
    records finds the task: messages or prompt and completion are a chat, text and label are a
    classification, and text alone is a language model. The task's preset does the rest. If the
    records suit several tasks, the error lists them.
    """
    from steadytrain.components.shared.workspace import Workspace
    from steadytrain.pipelines.early_checks import anywhere, check_here, check_plugins, check_tools
    from steadytrain.pipelines.runs import run_lock
    from steadytrain.pipelines.sources import open_source

    if not dry_run:
        check_extra("train", "steadytrain run")
    chosen = open_source(source, with_options(overrides, run=name, output=output))
    for remark in (*chosen.remarks, *anywhere(chosen.config)):
        typer.echo(remark, err=True)
    check_plugins(chosen.config)
    if dry_run:
        _outline(chosen.config, as_json=as_json)
        return
    workspace = Workspace.of(chosen.config)
    if not workspace.record("preprocess").exists():
        check_here(chosen.config)
    check_tools(chosen.config)
    workspace.create()
    with run_lock(workspace) as lock:
        _run(chosen.config, lock, as_json=as_json)


def resume(name: RunName, output: Output = DEFAULT_OUTPUT, as_json: Json = False) -> None:
    """Continue a run that stopped or failed.

    It uses the run's own stored configuration. Completed work is not repeated: training resumes
    from the newest verified checkpoint. The run may have been stopped, killed or preempted, or may
    have failed. First fix what its error names (`steadytrain explain RUN`). To continue with other
    settings, use `steadytrain run OUTPUT/runs/RUN/config.yaml --set FIELD=VALUE`. Settings that
    determine the weights cannot change within a run.
    """
    from steadytrain.pipelines.runs import find_workspace, run_lock

    workspace = find_workspace(output, name)
    workspace.create()
    # Before everything that takes time, so that `stop` finds this command.
    with run_lock(workspace) as lock:
        _resume(workspace, lock, as_json=as_json)


def _resume(workspace: Workspace, lock: int, *, as_json: bool) -> None:
    from steadytrain.pipelines.early_checks import check_plugins
    from steadytrain.pipelines.local import LocalRun
    from steadytrain.pipelines.outline import as_data
    from steadytrain.pipelines.runs import find_run, state_of

    output, name = workspace.output, workspace.run_id
    config, _ = find_run(output, name)
    if state_of(workspace, ours=True).state == "finished":
        if as_json:
            options.show(as_data(LocalRun(workspace, True, None, None)))
        else:
            typer.echo(
                f"{name} is finished; `steadytrain report {name} -o {output}` shows what happened"
            )
        return
    check_extra("train", "steadytrain resume")
    check_plugins(config)
    _run(config, lock, as_json=as_json)


def _outline(config: RunConfig, *, as_json: bool) -> None:
    from steadytrain.components.shared.workspace import Workspace
    from steadytrain.pipelines.outline import outline

    lines = outline(config)
    if as_json:
        folder = str(Workspace.of(config).folder)
        content = {"run": config.run_id, "folder": folder}
        options.show({**content, "configuration": config.model_dump(mode="json")})
    else:
        typer.echo("\n".join(lines))


def _run(config: RunConfig, lock: int, *, as_json: bool) -> None:
    from steadytrain.components.shared.log import Log
    from steadytrain.components.shared.workspace import Workspace
    from steadytrain.pipelines.local import LocalRun, print_line, run_locally
    from steadytrain.pipelines.outline import as_data, print_ending, stopping
    from steadytrain.pipelines.progress import ProgressDisplay

    json_lines = config.observability.logs == "json"
    display = Log(config.run_id, "json") if json_lines else ProgressDisplay()
    try:
        ended = run_locally(config, lock, display=display)
    except Stopped as stopped:
        # The third signal. Checkpoints that were saved before are still good.
        workspace = Workspace.of(config)
        print_line("\n".join(stopping(workspace)))
        if as_json:
            options.show(as_data(LocalRun(workspace, False, stopped.number, None)))
        raise
    # With JSON lines, standard output has nothing else, so the ending goes to standard error.
    print_ending(replace(ended, shown=ended.shown and not json_lines), as_json=as_json)


def list_(output: Output = DEFAULT_OUTPUT, as_json: Json = False) -> None:
    """List the runs in an output folder."""
    from rich.console import Console
    from rich.table import Table

    from steadytrain.components.shared.quantities import moment
    from steadytrain.pipelines.runs import list_runs

    runs = list(list_runs(output))
    if as_json:
        options.show({"runs": [item.as_data() for item in runs]})
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
        options.show({"run": name, "stopped": stopped, "next": again})
    elif stopped:
        typer.echo(f"stopped {name}; continue it with {again}")
    else:
        typer.echo(f"{name} is not running")


def adjust(
    name: RunName,
    overrides: Overrides = [],  # noqa: B006  typer copies it
    at_step: Annotated[
        int,
        typer.Option(
            min=0,
            help="Optimizer step after which it counts. 0, or a step that has passed, means the "
            "checkpoint that the ranks save now.",
        ),
    ] = 0,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="Take back a request that is not applied yet.")
    ] = False,
    output: Output = DEFAULT_OUTPUT,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would change, and exit.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Change a setting of a run while it trains.

    The ranks save a checkpoint and start again from it with the new value. A learning rate is the
    peak of the schedule: what is left of the schedule is scaled, and its shape stays. Ledger,
    report and MLflow record it as your change, with the step after which it counts, and every later
    attempt keeps it. If the run is not active, it counts once you continue it. The error for a
    field that cannot change, or for a trial of a study, says why, what to do instead, and which
    fields can.
    """
    from steadytrain.components.shared.config.load import override_items
    from steadytrain.components.train.recovery import adjust as adjusting
    from steadytrain.components.train.recovery.ledger import Ledger
    from steadytrain.components.tune.trials.folder import find_trial
    from steadytrain.pipelines.runs import find_run, find_workspace, is_running, state_of

    if (trial := find_trial(output, name)) is not None:
        raise BadInput(
            f"run {name!r} is trial {trial.number} of the study {trial.study.name}: with another "
            "value, its score would stand for settings that it did not have",
            remedy="change tune.space and search again, or adjust a run that is not a trial",
        )
    if cancel:
        if overrides or at_step or dry_run:
            raise BadInput("--cancel takes no other option", remedy="leave the others out")
        gone = adjusting.cancel(find_workspace(output, name))
        text = f"took back the request to {name}" if gone else f"no request to {name} is waiting"
        options.show({"run": name, "cancelled": gone}) if as_json else typer.echo(text)
        return
    if not overrides:
        raise BadInput("nothing to change", remedy="for example --set training.learning_rate=1e-5")
    config, workspace = find_run(output, name)
    request = adjusting.checked(config, dict(override_items(overrides)), at_step=at_step)
    running = is_running(workspace)
    if state_of(workspace).state == "finished" or _is_trained(workspace):
        raise BadInput(
            f"run {name!r} has finished training, so there is nothing to adjust",
            remedy=f"start a run with another name and --set {request.field}={request.value:g}",
        )
    history = Ledger(workspace).readable()[0]
    if history.planned_steps is not None and at_step >= history.planned_steps:
        raise BadInput(
            f"--at-step {at_step}: the run has {history.planned_steps:,} steps",
            remedy=f"give a step below {history.planned_steps}",
        )
    step = history.last_step
    change = adjusting.adjustment(request, config, history, attempt=history.next_attempt, step=step)
    assert change is not None
    replaced = history.replaced_from(change.step, change.field)
    same = change.before == change.after and not replaced and not workspace.adjust.exists()
    asked = not same and not dry_run and adjusting.submit(workspace, request)
    when = "at the next checkpoint" if running else "when you continue the run"
    about: dict[str, object] = {
        "field": change.field,
        "before": change.before,
        "after": change.after,
        "step": step,
        "replaced": [{"after": item.after, "step": item.step} for item in replaced],
    }
    if as_json:
        waiting = not same and not dry_run
        options.show({"run": name, **about, "running": running, "new": asked, "waiting": waiting})
    elif same:
        after = f" after step {change.step:,}" if change.step > step else ""
        typer.echo(f"{change.field} of {name} is {change.after:g} already{after}")
    else:
        what = "would change" if dry_run else "requested" if asked else "requested already"
        of = "" if change.before is None else f"{change.before:g} -> "
        after = f"after step {at_step:,}" if at_step > step else when
        instead = "".join(
            f"; it replaces {item.after:g} after step {item.step:,}" for item in replaced
        )
        typer.echo(f"{what}: {change.field} {of}{change.after:g}, {after}{instead}")


def _is_trained(workspace: Workspace) -> bool:
    """Return whether the newest attempt has finished training."""
    from steadytrain.components.train.recovery.ledger import Ledger
    from steadytrain.components.train.recovery.outcome import SUCCESSES

    attempts = Ledger(workspace).readable()[0].attempts
    ended = attempts[-1].ended if attempts else None
    return ended is not None and ended.outcome in SUCCESSES


def report(name: RunName, output: Output = DEFAULT_OUTPUT, as_json: Json = False) -> None:
    """Write the HTML report of a run again, and summarize it."""
    from steadytrain.components.report.explain import summary, summary_as_data
    from steadytrain.components.report.step import run as write_report
    from steadytrain.components.report.step import write_page
    from steadytrain.pipelines.runs import find_run, is_running, run_lock

    config, workspace = find_run(output, name)
    running = is_running(workspace)
    try:
        with run_lock(workspace):
            write_report(config)
    except RunBusy:
        write_page(workspace, running=True)
    if as_json:
        options.show(summary_as_data(workspace, running=running))
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
    from steadytrain.components.report.comparison import compare as compare_runs
    from steadytrain.components.report.comparison import lines, render
    from steadytrain.components.report.facts import gather
    from steadytrain.pipelines.runs import find_run

    if first == second:
        raise BadInput(f"{first!r} is given twice", remedy="give the names of two runs")
    (config, workspace), (_, other) = find_run(output, first), find_run(output, second)
    comparison = compare_runs(gather(workspace), gather(other), config)
    if html is not None:
        write_requested(html, render(comparison).encode(), "--html")
    if as_json:
        options.show({**comparison.as_data(), "page": str(html) if html else None})
    else:
        typer.echo("\n".join([*lines(comparison), *([f"page: {html}"] if html else [])]))


def top(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="A run's name, to show only this run, in detail.",
            autocompletion=options.runs,
        ),
    ] = None,
    output: Place = str(DEFAULT_OUTPUT),
    sort: Annotated[
        Literal["active", "run", "state", "step", "loss", "speed", "memory", "attempts"],
        typer.Option(help="Order of the runs. active: the one with the newest event first."),
    ] = "active",
    limit: Annotated[
        int, typer.Option(min=1, max=100_000, help="How many runs to show at most.")
    ] = 100,
    as_json: Json = False,
) -> None:
    """Show runs live in the terminal: loss curves, throughput, memory, attempts and decisions.

    Shows the runs of an output folder, or of its copy on S3. Press s to change the order, and q to
    quit. If standard output is not a terminal, it prints once.
    """
    from rich.console import Console

    from steadytrain.pipelines.view.library import Library
    from steadytrain.pipelines.view.source import open_source
    from steadytrain.pipelines.view.top import show_run, show_runs

    library = Library(open_source(output))
    board = library.board
    if as_json:
        chosen = board.rows(sort)[:limit] if name is None else [library.open(name).row.run]
        options.show({"runs": [board.row(run).as_data() for run in chosen]})
    elif name is None:
        show_runs(board, sort, limit, Console())
    else:
        show_run(library, name, Console())


def ui(
    output: Place = str(DEFAULT_OUTPUT),
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on. Any other than this machine's own needs a token in "
            "STEADYTRAIN_UI_TOKEN."
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes any free one.")
    ] = 8484,
) -> None:
    """Show all runs on a local web page that updates itself.

    It lists the runs of an output folder, or of its copy on S3, and shows of each run its curves,
    attempts, timeline, logs by rank, predicted and measured memory and speed, and configuration.
    Select up to ten runs to compare their curves, results and configurations.

    It reads files and writes none, and loads nothing from other hosts. For runs on another machine,
    forward the port: `ssh -L 8484:127.0.0.1:8484 HOST steadytrain ui`.
    """
    check_extra("ui", "steadytrain ui")
    from steadytrain.components.shared import web_server
    from steadytrain.pipelines.view import app as server
    from steadytrain.pipelines.view.source import open_source

    token = os.environ.get(server.TOKEN_VARIABLE, "")
    web_server.check_token(host, token, server.TOKEN_VARIABLE)
    source = open_source(output)
    listener = web_server.listen(host, port)
    typer.echo(f"{web_server.address_of(listener, host)} shows {source.uri}; Ctrl-C ends it")
    server.serve(source, listener, hosts=web_server.accepted_hosts(host), token=token)


def explain(name: RunName, output: Output = DEFAULT_OUTPUT, as_json: Json = False) -> None:
    """Show in ten lines what happened in a run and what to do.

    Shows the training attempts, how each failure happened, what was decided and changed, the newest
    checkpoint, and where the time went. Also works on an active run.
    """
    from steadytrain.components.report.explain import explain as explained
    from steadytrain.components.report.explain import explanation_as_data
    from steadytrain.pipelines.runs import find_workspace, is_running

    workspace = find_workspace(output, name)
    running = is_running(workspace)
    if as_json:
        options.show(explanation_as_data(workspace, running=running))
    else:
        typer.echo("\n".join(explained(workspace, running=running)))


def gc(
    output: Output = DEFAULT_OUTPUT,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what would be removed, but remove nothing.")
    ] = False,
    idle_hours: Annotated[
        float,
        typer.Option(
            min=0,
            callback=at_most(YEAR / 3600),
            help="Keep runs that were active within this many hours.",
        ),
    ] = 24,
    as_json: Json = False,
) -> None:
    """Remove what ended runs no longer need.

    That is checkpoints, data, and unpromoted model versions. A finished run loses all its
    checkpoints, since its model is stored separately. If you train it further, or train it again,
    it starts at step 0. A run that can be resumed keeps its newest verified checkpoint, newer ones,
    and the best one. A model version is removed if its run registered it as a candidate, it was
    never champion, and no alias points to it now. Prepared data are removed once every run that
    used them is finished; a later run prepares them again. A study loses what its ended trials left
    and, once none is paused, its data. It keeps active runs, runs that were
    active recently (even if recovery.checkpoints is elsewhere), and past and present champions.
    """
    from steadytrain.components.shared.quantities import size
    from steadytrain.pipelines.gc import garbage

    discarded: list[dict[str, str | int]] = []
    for item in garbage(output, idle_seconds=idle_hours * 3600):
        if not dry_run and not item.remove():
            if not as_json:
                typer.echo(f"kept {item.what}: it is in use again")
            continue
        discarded.append({"what": item.what, "bytes": item.bytes})
        if not as_json:
            done = "would remove" if dry_run else "removed"
            typer.echo(f"{done} {item.what}, {size(item.bytes)}")
    total = sum(int(item["bytes"]) for item in discarded)
    if as_json:
        options.show({"dry_run": dry_run, "removed": discarded, "bytes": total})
    elif not discarded:
        typer.echo(f"nothing to remove in {output}")
    else:
        typer.echo(
            f"{size(total)} in all{'; run it without --dry-run to remove them' if dry_run else ''}"
        )

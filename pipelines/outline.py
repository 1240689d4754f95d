"""What a run would do, and how a run ended, in a few plain lines."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import typer

from steadytrain.components.report import explain
from steadytrain.components.report.facts import gather
from steadytrain.components.report.story import executions, latest
from steadytrain.components.shared.config import RunConfig, load
from steadytrain.components.shared.config.data_sections import SERIES
from steadytrain.components.shared.events.types import StepFailed
from steadytrain.components.shared.records import GateRecord, RegistrationRecord
from steadytrain.components.shared.tracking.connect import resolve_uri, shown
from steadytrain.components.shared.tracking.run import version_link
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.sizing.batch import plan_batch
from steadytrain.components.tasks.base import load_task
from steadytrain.pipelines import options
from steadytrain.pipelines.local import LocalRun, print_line, silence

_DONE = ("finished", "reused")


def outline(config: RunConfig) -> list[str]:
    """Return lines on what `steadytrain run` would do with a configuration."""
    training, ranks = config.training, config.compute.world_size
    family = config.model.config.get("model_type", "a fused model")
    rate = training.learning_rate
    rate_text = "the rule's learning rate" if rate is None else f"learning rate {rate:g}"
    batch = plan_batch(training.global_batch_size, ranks, training.micro_batch)
    length = (
        f"{training.max_steps} steps"
        if training.max_steps > 0
        else f"{training.num_train_epochs:g} epochs"
    )
    return [
        f"run         {config.run_id}",
        f"output      {Workspace.of(config).folder}",
        f"preprocess  {config.data.task} from "
        + ", ".join(address for _, address in config.data.addresses),
        f"train       {config.model.base or f'{family} from scratch'}, "
        f"{length} at {rate_text}, on {ranks} "
        f"rank{'s' if ranks > 1 else ''}",
        "batch       all records of the training side in each step"
        if load_task(config.data.task).tabular or config.data.task in SERIES
        else f"batch       {training.global_batch_size} = {batch.micro_batch_size} (micro-batch) x "
        f"{batch.gradient_accumulation_steps} (accumulation) x {ranks} (world size)",
        f"evaluate    on the test side, and against the champion of {config.model_name} if "
        "there is one",
        f"register    {config.model_name}, alias {config.registry.candidate_alias}; "
        f"{config.registry.champion_alias} if the gate accepts it",
    ]


def ending(run: LocalRun) -> list[str]:
    """Return lines on where to look after a run, and on what to do if it did not finish."""
    workspace, lines = run.workspace, [""]
    if run.succeeded:
        version = RegistrationRecord.load(workspace.record("register"))
        gate = GateRecord.load(workspace.record("gate"))
        lines += [
            f"model   {version.model_name} version {version.version} ({version.model_uri})",
            f"gate    {gate.reason}",
            f"mlflow  {_tracking(load(workspace.config), workspace, version)}",
        ]
    elif run.stopped is not None:
        lines += stopping(workspace)
    elif run.failure is not None:
        lines += _failure(run.failure, run.log)
    if workspace.report.is_file():
        lines.append(f"report  {workspace.report}")
    return lines


def as_data(run: LocalRun) -> dict[str, Any]:
    """Return for programs how a run ended, what it produced, and the command that continues it."""
    workspace = run.workspace
    result = explain.summary_as_data(workspace)
    outcome = "stopped" if run.stopped is not None else "finished" if run.succeeded else "failed"
    return {
        "run": workspace.run_id,
        "outcome": outcome,
        "failure": run.failure.as_plain() if run.failure and run.stopped is None else None,
        **{name: result[name] for name in ("training", "test", "gate")},
        "records": {path.stem: str(path) for path in sorted(workspace.records.glob("*.json"))},
        "report": result["report"] if workspace.report.is_file() else None,
        "log": str(run.log) if run.log.is_file() else None,
        "next": None if run.succeeded else resume_command(workspace),
    }


def stopping(workspace: Workspace) -> list[str]:
    """Return lines on what a stopped run has saved, and the command that continues it."""
    if not workspace.config.is_file():
        return ["stopped before anything was saved; the same command starts it again"]
    facts = gather(workspace)
    done = [item.stage for item in latest(executions(facts.events)) if item.state in _DONE]
    step, planned = facts.history.last_step, facts.history.planned_steps
    if step and "train" not in done:
        saved = f"the checkpoint of step {step:,}" + (f" of {planned:,}" if planned else "")
    else:
        saved = f"the results of {', '.join(done)}" if done else "nothing yet"
    return ["stopped", f"saved   {saved}", f"next    {resume_command(workspace)}"]


def resume_command(workspace: Workspace) -> str:
    """Return the command that continues a run from any folder."""
    return f"steadytrain resume {workspace.arguments}"


def print_ending(run: LocalRun, *, as_json: bool) -> None:
    """Print how a run ended, and exit with its status if it did not succeed.

    Prints to standard error if standard output is lost. With `as_json`, shows it as an object.

    Raises:
        typer.Exit: the run was stopped or failed.
    """
    options.show(as_data(run)) if as_json else _print("\n".join(ending(run)), shown=run.shown)
    if run.exit_code:
        raise typer.Exit(run.exit_code)


def _print(text: str, *, shown: bool) -> None:
    if shown:
        try:
            typer.echo(text)
        except OSError:
            shown = False
            silence()
    if not shown:
        print_line(text)


def _failure(failure: StepFailed, log: Path) -> list[str]:
    lines = [f"failed in {failure.stage}: {failure.message}"]
    if failure.remedy:
        lines.append(f"fix     {failure.remedy}")
    # It is gone if somebody deleted the run's folder.
    return [*lines, f"log     {log}"] if log.is_file() else lines


def _tracking(config: RunConfig, workspace: Workspace, version: RegistrationRecord) -> str:
    """Return the version's page if a server tracks the run, else the command to serve the store."""
    link = version_link(config, workspace, version.model_name, version.version)
    if link:
        return link["mlflow_version"]
    uri = shown(resolve_uri(config, workspace))
    return f"mlflow ui --backend-store-uri {shlex.quote(uri)}"

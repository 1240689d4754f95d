"""`steadytrain submit`: start a run on a Kubeflow server from the terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from steadytrain.components.shared.errors import Stopped
from steadytrain.pipelines import json_output
from steadytrain.pipelines.json_output import Json
from steadytrain.pipelines.options import (
    Host,
    Namespace,
    Overrides,
    Pipeline,
    Run,
    RunOutput,
    Source,
    given,
)

if TYPE_CHECKING:
    from rich.table import Table

    from steadytrain.pipelines.server.follow import PipelineOutcome, Step, Steps
    from steadytrain.pipelines.server.submission import SubmittedRun


def submit(
    source: Source,
    overrides: Overrides = [],  # noqa: B006  typer copies it
    run_name: Run = None,
    output: RunOutput = None,
    pipeline: Pipeline = "finetune",
    host: Host = "",
    namespace: Namespace = "",
    experiment: Annotated[
        str, typer.Option(help="KFP experiment. Default: `tracking.experiment`.")
    ] = "",
    pipeline_root: Annotated[
        str, typer.Option(help="Where KFP stores artifacts. Default: the server's setting.")
    ] = "",
    service_account: Annotated[
        str, typer.Option(help="Service account of the run's pods. Default: the server's setting.")
    ] = "",
    wait: Annotated[
        bool,
        typer.Option(
            "--wait",
            help="Follow the run, and the runs that continue it if it loses a step, until the last "
            "one ends. Exit with status 1 if it fails, or if a step can never start.",
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show what would be sent, without contacting a server."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Start a run on a Kubeflow server.

    The pipeline is uploaded if its content is new to the server, and the run starts in an
    experiment. Its `output` must be a folder on the volume that every step mounts at
    /mnt/steadytrain.

    Credentials come only from the environment: KFP_EXISTING_TOKEN or KFP_COOKIE (of a login to
    multi-user Kubeflow). In a pod, the token that the cluster mounts is used. From a machine with
    kubectl: kubectl -n kubeflow port-forward svc/ml-pipeline-ui 8080:80
    """
    from steadytrain.components.shared.config import load
    from steadytrain.pipelines.remarks import anywhere, on_cluster
    from steadytrain.pipelines.server import submission

    config = load(source, given(overrides, run=run_name, output=output))
    for remark in (*anywhere(config), *on_cluster(config)):
        _warn(remark)
    options = {
        "experiment": experiment,
        "pipeline_root": pipeline_root,
        "service_account": service_account,
    }
    if dry_run:
        planned = submission.Submission.of(config, pipeline=pipeline, **options).in_callers_trace()
        lines = submission.outline(planned, _warn, pipeline=pipeline)
        if as_json:
            json_output.show({"parameters": planned.parameters, "experiment": planned.experiment})
        else:
            typer.echo("\n".join(lines))
        return
    run = submission.submit(
        config,
        pipeline=pipeline,
        host=host,
        namespace=namespace,
        tell=_warn,
        **options,
    )
    if as_json:
        later: list[SubmittedRun] = []
        try:
            outcome = run.wait(on_resubmission=later.append, tell=_warn) if wait else None
        except (KeyboardInterrupt, Stopped):
            _as_json(run, later, None)
            raise typer.Exit(130) from None
        _as_json(run, later, outcome)
        return
    upload = "uploaded" if run.version.uploaded else "there already"
    typer.echo(f"pipeline  {run.version.pipeline}, version {run.version.name} ({upload})")
    typer.echo(f"run       {run.name} ({run.run_id})")
    if run.url:
        typer.echo(f"link      {run.url}")
    if wait:
        _end(run, _followed(run))


def _as_json(
    run: SubmittedRun, later: Sequence[SubmittedRun], outcome: PipelineOutcome | None
) -> None:
    """Print the run and, if it was followed, its end; exit with status 1 if it failed.

    Args:
        later: the runs that continued it.
    """
    from steadytrain.components.report.explain import failure_as_data

    version = {"pipeline": run.version.pipeline, "version": run.version.name}
    named = {"run": run.name, "run_id": run.run_id, "link": run.url or None}
    steps = outcome and {name: step.state for name, step in outcome.steps.items()}
    story = outcome.story if outcome else None
    json_output.show(
        {
            **named,
            **version,
            "uploaded": run.version.uploaded,
            "resubmitted_as": [item.run_id for item in later],
            "state": outcome and outcome.state,
            "steps": steps,
            "summary": story.sentence if story else (outcome.message if outcome else None),
            "failure": failure_as_data(story.failure if story else None),
        }
    )
    if outcome and not outcome.succeeded:
        raise typer.Exit(1)


def _followed(run: SubmittedRun) -> PipelineOutcome:
    def tell(following: SubmittedRun) -> None:
        link = f" ({following.url})" if following.url else ""
        typer.echo(f"a step was lost; resubmitted as run {following.run_id}{link}")

    try:
        with _view() as show:
            return run.wait(show, tell, _warn)
    except (KeyboardInterrupt, Stopped):
        typer.echo("the run continues", err=True)
        raise typer.Exit(130) from None


def _end(run: SubmittedRun, outcome: PipelineOutcome) -> None:
    if outcome.stuck:
        typer.echo(f"{run.name}: {outcome.message}", err=True)
        typer.echo(
            "fix: terminate the run in Kubeflow Pipelines, which keeps waiting, fix what the "
            "message names, and submit it again",
            err=True,
        )
        raise typer.Exit(1)
    typer.echo(f"{run.name} {outcome.state.lower()}")
    if outcome.story:
        typer.echo(outcome.story.sentence, err=not outcome.succeeded)
    if outcome.succeeded:
        return
    failure = outcome.story.failure if outcome.story else None
    if failure:
        typer.echo(f"{failure.error}: {failure.message}", err=True)
        if failure.remedy:
            typer.echo(f"fix: {failure.remedy}", err=True)
    failed = [name for name, step in outcome.steps.items() if step.state == "FAILED"]
    if failed and not outcome.story:
        typer.echo(
            f"failed in {', '.join(failed)}; the reason is in the logs of its pods", err=True
        )
    if outcome.message:
        typer.echo(outcome.message, err=True)
    raise typer.Exit(1)


@contextlib.contextmanager
def _view() -> Iterator[Callable[[Steps], object]]:
    """Yield a function that shows the steps: a live table on a terminal, else a line per change."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        yield _Lines(console.out)
        return
    from rich.live import Live

    with Live(console=console) as live:
        yield lambda steps: live.update(_table(steps))


class _Lines:
    """Prints each state of each step once, and each new reason for a wait."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self.write = write
        self.shown: Steps = {}

    def __call__(self, steps: Steps) -> None:
        for name, step in steps.items():
            if not step.same(self.shown.get(name)):
                self.shown[name] = step
                self.write(f"{name}: {_state(step)}")


def _table(steps: Steps) -> Table:
    from rich.table import Table

    table = Table("step", "state", box=None, pad_edge=False)
    for name, step in steps.items():
        table.add_row(name, _state(step))
    return table


def _state(step: Step) -> str:
    from steadytrain.components.shared.quantities import duration

    ended = step.seconds is not None and step.state not in ("PENDING", "RUNNING")
    took = f" ({duration(step.seconds)})" if ended and step.seconds is not None else ""
    return f"waits: {step.waits_for}" if step.waits_for else f"{step.state.lower()}{took}"


def _warn(finding: object) -> None:
    typer.echo(str(finding), err=True)

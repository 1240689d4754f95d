"""`steadytrain submit`, `trigger` and `watch`: start a run on a Kubeflow server."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from steadytrain.components.shared.errors import Stopped
from steadytrain.pipelines import options as options_module
from steadytrain.pipelines.options import (
    YEAR,
    Host,
    Json,
    Namespace,
    Overrides,
    Pipeline,
    Run,
    RunOutput,
    Source,
    at_most,
    with_options,
)

if TYPE_CHECKING:
    from rich.table import Table

    from steadytrain.components.shared.config.load import Override
    from steadytrain.pipelines.server.follow import PipelineOutcome, Step, Steps
    from steadytrain.pipelines.server.submission import SubmittedRun
    from steadytrain.pipelines.server.triggers import Answer, Trigger


Experiment = Annotated[str, typer.Option(help="KFP experiment. Default: `tracking.experiment`.")]


def submit(
    source: Source,
    overrides: Overrides = [],  # noqa: B006  typer copies it
    run_name: Run = None,
    output: RunOutput = None,
    pipeline: Pipeline = "finetune",
    host: Host = "",
    namespace: Namespace = "",
    experiment: Experiment = "",
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
    from steadytrain.pipelines.early_checks import anywhere, on_cluster
    from steadytrain.pipelines.searches import configuration_for
    from steadytrain.pipelines.server import submission

    given = with_options(overrides, run=run_name, output=output)
    config, remarks = configuration_for(pipeline, source, given)
    for remark in (*remarks, *anywhere(config), *on_cluster(config)):
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
            options_module.show(
                {"parameters": planned.parameters, "experiment": planned.experiment}
            )
        else:
            typer.echo("\n".join(lines))
        return
    run = submission.submit(
        config,
        pipeline=pipeline,
        host=host,
        namespace=namespace,
        notify=_warn,
        **options,
    )
    if as_json:
        later: list[SubmittedRun] = []
        try:
            outcome = run.wait(on_resubmission=later.append, notify=_warn) if wait else None
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
    version = {"pipeline": run.version.pipeline, "version": run.version.name}
    named = {"run": run.name, "run_id": run.run_id, "link": run.url or None}
    steps = outcome and {name: step.state for name, step in outcome.steps.items()}
    story = outcome.story if outcome else None
    options_module.show(
        {
            **named,
            **version,
            "uploaded": run.version.uploaded,
            "resubmitted_as": [item.run_id for item in later],
            "state": outcome and outcome.state,
            "steps": steps,
            "summary": story.sentence if story else (outcome.message if outcome else None),
            "failure": story.failure.as_plain() if story and story.failure else None,
        }
    )
    if outcome and not outcome.succeeded:
        raise typer.Exit(1)


def _followed(run: SubmittedRun) -> PipelineOutcome:
    def notify(following: SubmittedRun) -> None:
        link = f" ({following.url})" if following.url else ""
        typer.echo(f"a step was lost; resubmitted as run {following.run_id}{link}")

    try:
        with _view() as show:
            return run.wait(show, notify, _warn)
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


State = Annotated[
    str,
    typer.Option(
        help="Folder or s3:// address that records which runs were started. Default: the folder "
        "`triggers` in the configuration's output."
    ),
]


def trigger(
    source: Source,
    overrides: Overrides = [],  # noqa: B006  typer copies it
    output: RunOutput = None,
    pipeline: Pipeline = "retrain",
    host: Host = "",
    namespace: Namespace = "",
    experiment: Experiment = "",
    state: State = "",
    as_json: Json = False,
) -> None:
    """Start a run on a Kubeflow server for the current data, once.

    Use it in a CronJob, a webhook or a CI job. It starts nothing if these data already had a
    run, or if the last triggered run is still active. A run that failed is started again up to
    twice, 10 min and 1 h after it failed, and continues where it stopped. To run again anyway, use
    `steadytrain submit`. The data have changed if a file's name, size or time (in S3, its tag) is
    different.
    """
    from steadytrain.components.shared.kubeflow.connection import connect
    from steadytrain.pipelines.server import triggers

    what = _trigger(source, with_options(overrides, output=output), pipeline, experiment, state)
    answer = triggers.trigger(connect(host, namespace), what)
    if as_json:
        options_module.show({"outcome": answer.kind, **_named(answer)})
    else:
        typer.echo(str(answer))


def watch(
    source: Source,
    overrides: Overrides = [],  # noqa: B006  typer copies it
    output: RunOutput = None,
    pipeline: Pipeline = "retrain",
    host: Host = "",
    namespace: Namespace = "",
    experiment: Experiment = "",
    state: State = "",
    every: Annotated[
        float,
        typer.Option(min=1, callback=at_most(YEAR), help="Seconds between checks of the data."),
    ] = 60,
    quiet: Annotated[
        float,
        typer.Option(
            min=0, callback=at_most(YEAR), help="Seconds without a change before a run starts."
        ),
    ] = 300,
    as_json: Json = False,
) -> None:
    """Start a run on a Kubeflow server whenever the data change.

    It watches where the data are (folders, s3:// prefixes). A run starts once nothing has changed
    for a while, since an upload may be in progress, and once the run before it has ended. What was
    started is recorded in storage, so you can restart watchers at any time, and run several of
    them. Stops on SIGTERM and Ctrl-C. With --json, it then prints the runs that it started.
    """
    from steadytrain.components.shared.kubeflow.connection import connect
    from steadytrain.components.shared.quantities import moment
    from steadytrain.pipelines.server import triggers

    what, stop = (
        _trigger(source, with_options(overrides, output=output), pipeline, experiment, state),
        threading.Event(),
    )
    server = connect(host, namespace)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    watched = ", ".join(address for _, address in what.config.data.addresses)
    typer.echo(f"watching {watched}", err=as_json)
    started = triggers.watch(
        server,
        what,
        every_seconds=every,
        quiet_seconds=quiet,
        notify=lambda text: typer.echo(f"{moment(time.time())} {text}", err=as_json),
        wait=stop.wait,
    )
    if as_json:
        options_module.show({"started": [_named(answer) for answer in started]})


def _named(answer: Answer) -> dict[str, str | None]:
    return {"run": answer.run, "run_id": answer.run_id, "link": answer.url or None}


def _trigger(
    source: str, overrides: Sequence[Override], pipeline: Pipeline, experiment: str, state: str
) -> Trigger:
    from steadytrain.pipelines.server.submission import Submission
    from steadytrain.pipelines.server.triggers import Trigger

    submission = Submission.of(source, overrides, pipeline=pipeline, experiment=experiment)
    return Trigger.of(submission, pipeline, state)

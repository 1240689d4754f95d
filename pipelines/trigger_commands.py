"""`steadytrain trigger` and `steadytrain watch`: a run on a server when there are new data."""

from __future__ import annotations

import signal
import threading
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from steadytrain.pipelines.options import (
    YEAR,
    Host,
    Namespace,
    Overrides,
    Pipeline,
    Source,
    at_most,
)

if TYPE_CHECKING:
    from steadytrain.pipelines.server.triggers import Trigger

State = Annotated[
    str,
    typer.Option(
        help="Folder or s3:// address where is kept what was started; by default the folder "
        "`triggers` of the configuration's output."
    ),
]
Experiment = Annotated[
    str, typer.Option(help="KFP's experiment; by default `tracking.experiment`.")
]


def trigger(
    source: Source,
    overrides: Overrides = [],  # noqa: B006  typer copies it
    pipeline: Pipeline = "retrain",
    host: Host = "",
    namespace: Namespace = "",
    experiment: Experiment = "",
    state: State = "",
) -> None:
    """Start a run on a Kubeflow server for the data as they are now, once.

    For a CronJob, a webhook or a CI job. Nothing is started where these data had their run
    already, or where the last run that was triggered is still at work; to run again all the
    same, use `steadytrain submit`. Data are other ones where a file's name, size or time (in S3
    its tag) has changed.
    """
    from steadytrain.components.shared.kubeflow.connection import connect
    from steadytrain.pipelines.server import triggers

    what = _trigger(source, overrides, pipeline, experiment, state)
    typer.echo(str(triggers.trigger(connect(host, namespace), what)))


def watch(
    source: Source,
    overrides: Overrides = [],  # noqa: B006  typer copies it
    pipeline: Pipeline = "retrain",
    host: Host = "",
    namespace: Namespace = "",
    experiment: Experiment = "",
    state: State = "",
    every: Annotated[
        float,
        typer.Option(
            min=1, callback=at_most(YEAR), help="Seconds from one look at the data to the next."
        ),
    ] = 60,
    quiet: Annotated[
        float,
        typer.Option(
            min=0, callback=at_most(YEAR), help="Seconds without a change before a run is started."
        ),
    ] = 300,
) -> None:
    """Watch `data.source` (folders, s3:// prefixes), and start a run when it has changed.

    A run is started when nothing has changed for a while, since an upload may be going on, and
    when the run before it has ended. What was started is kept in storage: watchers may be
    restarted at any time, and several do no harm. Ends on SIGTERM and Ctrl-C.
    """
    from steadytrain.components.shared.kubeflow.connection import connect
    from steadytrain.pipelines.server import triggers

    what, stop = _trigger(source, overrides, pipeline, experiment, state), threading.Event()
    server = connect(host, namespace)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    typer.echo(f"watching {', '.join(what.config.data.source)}")
    triggers.watch(
        server,
        what,
        every_seconds=every,
        quiet_seconds=quiet,
        tell=lambda text: typer.echo(f"{datetime.now():%Y-%m-%d %H:%M:%S} {text}"),
        wait=stop.wait,
    )


def _trigger(
    source: str, overrides: list[str], pipeline: Pipeline, experiment: str, state: str
) -> Trigger:
    from steadytrain.pipelines.server.submission import Submission
    from steadytrain.pipelines.server.triggers import Trigger

    submission = Submission.of(source, overrides, experiment=experiment)
    return Trigger.of(submission, pipeline, state)

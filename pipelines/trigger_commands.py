"""`steadytrain trigger` and `steadytrain watch`: start a run on a server for new data."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from steadytrain.pipelines import json_output
from steadytrain.pipelines.json_output import Json
from steadytrain.pipelines.options import (
    YEAR,
    Host,
    Namespace,
    Overrides,
    Pipeline,
    RunOutput,
    Source,
    at_most,
    given,
)

if TYPE_CHECKING:
    from steadytrain.components.shared.config.load import Override
    from steadytrain.pipelines.server.triggers import Answer, Trigger

State = Annotated[
    str,
    typer.Option(
        help="Folder or s3:// address that records which runs were started. Default: the folder "
        "`triggers` in the configuration's output."
    ),
]
Experiment = Annotated[str, typer.Option(help="KFP experiment. Default: `tracking.experiment`.")]


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

    what = _trigger(source, given(overrides, output=output), pipeline, experiment, state)
    answer = triggers.trigger(connect(host, namespace), what)
    if as_json:
        json_output.show({"outcome": answer.kind, **_named(answer)})
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
        _trigger(source, given(overrides, output=output), pipeline, experiment, state),
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
        tell=lambda text: typer.echo(f"{moment(time.time())} {text}", err=as_json),
        wait=stop.wait,
    )
    if as_json:
        json_output.show({"started": [_named(answer) for answer in started]})


def _named(answer: Answer) -> dict[str, str | None]:
    return {"run": answer.run, "run_id": answer.run_id, "link": answer.url or None}


def _trigger(
    source: str, overrides: Sequence[Override], pipeline: Pipeline, experiment: str, state: str
) -> Trigger:
    from steadytrain.components.shared.config import load
    from steadytrain.pipelines.server.submission import Submission
    from steadytrain.pipelines.server.triggers import Trigger

    submission = Submission.of(load(source, overrides), pipeline=pipeline, experiment=experiment)
    return Trigger.of(submission, pipeline, state)

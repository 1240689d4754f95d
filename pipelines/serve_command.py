"""`steadytrain serve`: a registered model as a web service."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from steadytrain.pipelines import options
from steadytrain.pipelines.options import DEFAULT_OUTPUT, Output, check_extra


def serve(
    model: options.Model,
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on. Any other than this machine's own needs a token in "
            "STEADYTRAIN_SERVE_TOKEN."
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes any free one.")
    ] = 8485,
    columns: options.Columns = [],  # noqa: B006  typer copies it
    batch_size: Annotated[
        int, typer.Option(min=1, help="Records per call of the model, from waiting requests.")
    ] = 64,
    max_rows: Annotated[int, typer.Option(min=1, help="Most records of a request.")] = 256,
    max_bytes: Annotated[int, typer.Option(min=1, help="Most bytes of a request.")] = 1_000_000,
    timeout: Annotated[
        float, typer.Option(min=0.001, max=86400, help="Most seconds for a request.")
    ] = 30.0,
    cors_origin: Annotated[
        list[str],
        typer.Option(
            metavar="ORIGIN",
            help="A web front end that may call it from a browser, such as "
            "https://app.example.com. Can be repeated.",
        ),
    ] = [],  # noqa: B006  typer copies it
    output: Output = DEFAULT_OUTPUT,
) -> None:
    """Serve a registered model by HTTP, with the checks and answers of `steadytrain predict`.

    POST /predict takes {"records": [{"COLUMN": VALUE, ...}, ...]} and answers with a prediction for
    each, or with the reason for each record that has none. GET /schema shows the columns, from the
    model's signature, and the limits; /health, /ready and /metrics are for probes and Prometheus.
    Requests that wait are predicted together. SIGTERM ends it after the requests that have arrived.

    The model's own code runs, as MLflow has it, so name only models that you trust.

    For example: `steadytrain serve adult-income@champion --port 8485`
    """
    check_extra("data", "steadytrain serve")
    check_extra("serve", "steadytrain serve")
    from steadytrain.components.predict import service
    from steadytrain.components.predict.model import open_model
    from steadytrain.components.shared import web_server
    from steadytrain.components.shared.config.data import DataConfig
    from steadytrain.components.shared.stage import quiet

    token = os.environ.get(service.TOKEN_VARIABLE, "")
    web_server.check_token(host, token, service.TOKEN_VARIABLE)
    for origin in cors_origin:
        service.check_origin(origin)
    renamed = dict(map(options.column_pair, columns))
    quiet()
    # Before the model is loaded, which may take minutes.
    listener = web_server.listen(host, port)
    loaded = open_model(model, output, renamed)
    largest: int = DataConfig.model_fields["max_record_bytes"].default
    limits = service.Limits(
        rows=max_rows,
        bytes=max_bytes,
        record_bytes=loaded.trained.data.max_record_bytes if loaded.trained else largest,
        seconds=timeout,
        batch_size=batch_size,
    )
    app = service.application(
        loaded,
        limits,
        hosts=web_server.accepted_hosts(host),
        token=token,
        origins=cors_origin,
    )
    typer.echo(f"{web_server.address_of(listener, host)} serves {loaded.address}; Ctrl-C ends it")
    service.serve(app, listener, limits)

"""The commands that show runs live: top, ui."""

from __future__ import annotations

import os
from typing import Annotated, Literal

import typer

from steadytrain.components.shared.errors import BadInput
from steadytrain.pipelines import completion, json_output
from steadytrain.pipelines.json_output import Json
from steadytrain.pipelines.options import DEFAULT_OUTPUT, Place


def top(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="A run's name, to show only this run, in detail.",
            autocompletion=completion.runs,
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
        json_output.show({"runs": [board.row(run).as_data() for run in chosen]})
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
    from steadytrain.pipelines.view.source import open_source

    try:
        from steadytrain.pipelines.view import serve as server
    except ModuleNotFoundError as error:
        raise BadInput(
            f"steadytrain ui needs the package {error.name}",
            remedy="pip install 'steadytrain[ui]'",
        ) from error
    token = os.environ.get(server.TOKEN_VARIABLE, "")
    server.check_token(host, token)
    source = open_source(output)
    listener = server.listen(host, port)
    shown = f"[{host}]" if ":" in host else host
    typer.echo(f"http://{shown}:{listener.getsockname()[1]} shows {source.uri}; Ctrl-C ends it")
    server.serve(source, listener, hosts=server.accepted_hosts(host), token=token)

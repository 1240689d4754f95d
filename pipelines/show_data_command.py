"""The command `show-data`: what the model would see of the first records."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from steadytrain.pipelines import json_output
from steadytrain.pipelines.json_output import Json
from steadytrain.pipelines.options import DataSource, Overrides, Run, RunOutput, given

if TYPE_CHECKING:
    from steadytrain.components.preprocess.rendering import Document


def show_data(
    source: DataSource,
    n: Annotated[int, typer.Option("--n", min=1, max=200, help="Number of records.")] = 5,
    overrides: Overrides = [],  # noqa: B006  typer copies it
    run: Run = None,
    output: RunOutput = None,
    as_json: Json = False,
) -> None:
    """Show the first records as the model would see them, before any training.

    Each record is encoded with the run's settings and tokenizer, and decoded again. What the model
    learns to write is green on a terminal, and in [[double brackets]] elsewhere; the rest is only
    context. A record that cannot be used has the reason instead. Use it to check that the answers,
    and nothing else, are learned, and that the chat template prints what you expect.

    It writes nothing. A tokenizer that the run would train on all data is trained on these records.

    For example: `steadytrain show-data chats.jsonl --n 3 --set model.base=hub:NAME`
    """
    from steadytrain.components.preprocess.shown import show
    from steadytrain.components.shared.controls import on_one_line, printable
    from steadytrain.pipelines.sources import open_source

    chosen = open_source(source, given(overrides, run=run, output=output))
    found = show(chosen.config, n)
    if as_json:
        json_output.show({"records": [asdict(record) for record in found]})
        return
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    for record in found:
        place = on_one_line(printable(f"line {record.line} of {record.source}"))
        if record.problem:
            typer.echo(f"--- {place}: not used, {on_one_line(printable(record.problem))}\n")
            continue
        label = "" if record.label is None else f", label {on_one_line(printable(record.label))}"
        for number, row in enumerate(record.rows, 1):
            part = f", row {number} of {len(record.rows)}" if record.rows[1:] else ""
            cut = ", cut" if record.cut else ""
            unused = f"; {printable(record.unused)}" if record.unused else ""
            typer.echo(f"--- {place}: {record.tokens:,} tokens{cut}{part}{label}{unused}")
            for document in row:
                name = f"{document.name}, " if document.name else ""
                targets = f", {document.targets:,} targets" if record.marked else ""
                typer.echo(f"({name}{document.tokens:,} tokens{targets})")
                typer.echo(f"{_marked(document, color=color)}\n")


def _marked(document: Document, *, color: bool) -> str:
    from steadytrain.components.shared.controls import printable

    texts = [(printable(piece.text), piece.target) for piece in document.pieces]
    if color:
        green = typer.colors.GREEN
        return "".join(typer.style(text, fg=green) if target else text for text, target in texts)
    return "".join(f"[[{text}]]" if target else text for text, target in texts)

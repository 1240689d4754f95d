"""Commands about data and models: lineage, extract, show-data."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steadytrain.pipelines import options
from steadytrain.pipelines.options import (
    DEFAULT_OUTPUT,
    DataSource,
    Json,
    Output,
    Overrides,
    Run,
    RunOutput,
    check_extra,
    with_options,
)

if TYPE_CHECKING:
    from steadytrain.components.preprocess.data_card import Document


def lineage(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="MODEL@ALIAS | FINGERPRINT",
            help="A registered model, such as NAME@champion, or a fingerprint of prepared data.",
        ),
    ],
    output: Output = DEFAULT_OUTPUT,
    as_json: Json = False,
) -> None:
    """Show what a model was made from, or every model that was trained on some data.

    It asks the MLflow store of the output folder, or of MLFLOW_TRACKING_URI.
    """
    from steadytrain.components.register.lineage import LineageStore

    store = LineageStore(output)
    name, at, alias = subject.rpartition("@")
    if at:
        model = store.of_model(name, alias)
        if as_json:
            options.show(model.as_data())
            return
        typer.echo(f"version {model.version} of {model.model}")
        facts = {
            **model.made_from,
            **model.origin,
            "sources": ", ".join(model.sources),
            "environment": _listed(model.environment),
            "plan": _listed(model.plan),
            "mlflow run": model.mlflow_run,
            "attempts": str(model.attempts),
            "checkpoints": ", ".join(model.checkpoints),
        }
        for what, value in facts.items():
            if value:
                typer.echo(f"  {what.replace('_', ' ')}: {value}")
        return
    models = store.trained_on(subject)
    if as_json:
        options.show({"data": subject, "models": [item.as_data() for item in models]})
        return
    for item in models:
        names = f" ({', '.join(item.aliases)})" if item.aliases else ""
        run = item.made_from.get("run", "unknown")
        typer.echo(f"version {item.version} of {item.model}{names}, run {run}")


def _listed(facts: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def extract(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="The exported model of a multi_task run: a folder, models:/NAME@ALIAS, or another "
            "address as in model.base.",
        ),
    ],
    part: Annotated[str, typer.Argument(help="The name of the part, as in data.parts.")],
    folder: Annotated[Path, typer.Argument(help="The new folder to write the classifier to.")],
    output: Output = DEFAULT_OUTPUT,
    as_json: Json = False,
) -> None:
    """Write the classifier of one of several data sets as a model of its own.

    Transformers loads the folder with AutoModelForSequenceClassification. It works as a model.base,
    too.
    """
    check_extra("train", "steadytrain extract")
    from steadytrain.components.shared.config import from_mapping
    from steadytrain.components.shared.model_source import resolve_model
    from steadytrain.components.tasks.part_model import extract_part

    content = {"name": "extract", "data": {"source": ["unused"]}, "model": {"base": model}}
    config = from_mapping({**content, "output": str(output.absolute())})
    labels = extract_part(resolve_model(model, config), part, folder)
    if as_json:
        options.show({"folder": str(folder), "part": part, "labels": labels})
    else:
        typer.echo(f"{folder}: classifier of {part} with {', '.join(labels)}")


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
    context. A record of a table is shown with its label. A record that cannot be used has the
    reason instead. Use it to check that the answers, and nothing else, are learned, and that the
    chat template prints what you expect.

    It writes nothing. A tokenizer that the run would train on all data is trained on these records.

    For example: `steadytrain show-data chats.jsonl --n 3 --set model.base=hub:NAME`
    """
    from steadytrain.components.preprocess.data_card import show
    from steadytrain.components.shared.redaction import on_one_line, printable
    from steadytrain.pipelines.sources import open_source

    chosen = open_source(source, with_options(overrides, run=run, output=output))
    found = show(chosen.config, n)
    if as_json:
        options.show({"records": [asdict(record) for record in found]})
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
            # Records of a table are no tokens.
            count = f"{record.tokens:,} tokens" if record.tokens else "a record"
            typer.echo(f"--- {place}: {count}{cut}{part}{label}{unused}")
            for document in row:
                name = f"{document.name}, " if document.name else ""
                targets = f", {document.targets:,} targets" if record.marked else ""
                if record.tokens:
                    typer.echo(f"({name}{document.tokens:,} tokens{targets})")
                typer.echo(f"{_marked(document, color=color)}\n")


def _marked(document: Document, *, color: bool) -> str:
    from steadytrain.components.shared.redaction import printable

    texts = [(printable(piece.text), piece.target) for piece in document.pieces]
    if color:
        green = typer.colors.GREEN
        return "".join(typer.style(text, fg=green) if target else text for text, target in texts)
    return "".join(f"[[{text}]]" if target else text for text, target in texts)

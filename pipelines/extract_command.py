"""The command `extract`: one part's classifier from a model of several data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steadytrain.pipelines import json_output
from steadytrain.pipelines.extras import check_extra
from steadytrain.pipelines.json_output import Json
from steadytrain.pipelines.options import DEFAULT_OUTPUT, Output


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
        json_output.show({"folder": str(folder), "part": part, "labels": labels})
    else:
        typer.echo(f"{folder}: classifier of {part} with {', '.join(labels)}")

"""The command `lineage`: from a model back to its data and code, and from data to its models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer

from steadytrain.pipelines import json_output
from steadytrain.pipelines.json_output import Json
from steadytrain.pipelines.options import DEFAULT_OUTPUT, Output


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
            json_output.show(model.as_data())
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
        json_output.show({"data": subject, "models": [item.as_data() for item in models]})
        return
    for item in models:
        names = f" ({', '.join(item.aliases)})" if item.aliases else ""
        run = item.made_from.get("run", "unknown")
        typer.echo(f"version {item.version} of {item.model}{names}, run {run}")


def _listed(facts: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())

"""Options that several commands share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from steadytrain.components.shared.errors import BadInput

DEFAULT_OUTPUT = Path("steadytrain-output")


def _readable_folder(path: Path) -> Path:
    """A folder that is not there yet is an empty one."""
    try:
        there = path.exists()
        why = "" if not there or path.is_dir() else "not a folder"
        if there and not why and not os.access(path, os.R_OK | os.X_OK):
            why = "no permission to read it"
    except OSError as error:
        why = str(error.strerror)
    if why:
        raise BadInput(
            f"--output {str(path)!r}: {why}", remedy="give the folder that holds the runs"
        )
    return path


def at_most(largest: float) -> Callable[[float], float]:
    """A check of an option's number, which also refuses what is no number at all (nan)."""

    def check(value: float) -> float:
        if not value <= largest:
            raise typer.BadParameter(f"{value:g} is not a number up to {largest:,.0f}")
        return value

    return check


YEAR = 366 * 24 * 3600.0
"""The longest wait in seconds; what the system can wait for ends at some hundred years."""

Output = Annotated[
    Path,
    typer.Option(
        "--output", "-o", callback=_readable_folder, help="The folder that holds the runs."
    ),
]
RunName = Annotated[str, typer.Argument(help="A run's name; `steadytrain list` shows them.")]
Source = Annotated[str, typer.Argument(help="A preset's name or the path of a YAML file.")]
Overrides = Annotated[
    list[str],
    typer.Option("--set", metavar="FIELD=VALUE", help="For example training.max_steps=100."),
]
Pipeline = Annotated[
    Literal["finetune", "retrain"],
    typer.Option(help="retrain looks for new data first, and ends early where there are none."),
]
Host = Annotated[
    str, typer.Option(help="Address of the Kubeflow server; by default KF_PIPELINES_ENDPOINT.")
]
Namespace = Annotated[
    str, typer.Option(help="Of your profile, on a server of many users; by default KFP_NAMESPACE.")
]

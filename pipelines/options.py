"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

DEFAULT_OUTPUT = Path("steadytrain-output")

Output = Annotated[Path, typer.Option("--output", "-o", help="The folder that holds the runs.")]
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

"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_OUTPUT = Path("steadytrain-output")

Output = Annotated[Path, typer.Option("--output", "-o", help="The folder that holds the runs.")]
RunName = Annotated[str, typer.Argument(help="A run's name; `steadytrain list` shows them.")]

"""What the shell offers when the user presses Tab."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from pydantic import BaseModel


def runs(context: typer.Context, incomplete: str) -> list[str]:
    """Return names of runs in the output folder that start with the text typed so far."""
    from steadytrain.pipelines.runs import run_folders

    names = [path.name for path in run_folders(Path(context.params["output"]))]
    return [name for name in names if name.startswith(incomplete)]


def sources(incomplete: str) -> list[str]:
    """Return presets, YAML files and folders that start with the text typed so far."""
    from steadytrain.components.shared.config import preset_names

    folder = Path(incomplete).parent if not incomplete.endswith("/") else Path(incomplete)
    try:
        found = sorted(folder.iterdir())
    except OSError:
        found = []
    files = [f"{path}/" if path.is_dir() else str(path) for path in found]
    known = [name for name in files if name.endswith(("/", ".yaml", ".yml"))]
    return [name for name in [*preset_names(), *known] if name.startswith(incomplete)]


def overrides(incomplete: str) -> list[str]:
    """Return fields of the configuration, as FIELD=, that start with the text typed so far."""
    from steadytrain.components.shared.config import RunConfig

    return [f"{name}=" for name in _fields(RunConfig) if name.startswith(incomplete)]


def _fields(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    from pydantic import BaseModel

    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _fields(kind, f"{prefix}{name}.")
        else:
            yield prefix + name

"""What the shell offers when the user presses Tab."""

from __future__ import annotations

from pathlib import Path

import typer


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
    return [f"{name}=" for name in fields(incomplete)]


def fields(incomplete: str) -> list[str]:
    """Return fields of the configuration that start with the text typed so far."""
    from steadytrain.components.shared.config import RunConfig
    from steadytrain.components.shared.config.fields import leaves

    return [item.name for item in leaves(RunConfig) if item.name.startswith(incomplete)]

"""The configuration of a search: what three fields leave out, and the task that the data show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from steadytrain.components.shared.config import RunConfig, from_mapping, load
from steadytrain.components.shared.config.document import assign
from steadytrain.components.shared.config.load import Override, override_items, read_mapping
from steadytrain.components.shared.config.task_names import SERIES, TABLES
from steadytrain.components.shared.errors import BadInput, StorageError
from steadytrain.pipelines.pod_names import Pipeline
from steadytrain.pipelines.sources import name_for

Overrides = Iterable[Override] | Mapping[str, Any]


def configuration_for(
    pipeline: Pipeline, source: str | Path, overrides: Overrides
) -> tuple[RunConfig, list[str]]:
    """Return the configuration of a pipeline's run, and remarks on what was chosen.

    Raises:
        BadInput, ConfigError: see `load` and `searched`.
    """
    return searched(source, overrides) if pipeline == "automl" else (load(source, overrides), [])


def searched(source: str | Path, overrides: Overrides) -> tuple[RunConfig, list[str]]:
    """Return the configuration of a run, whose task is inferred, and what was chosen.

    Raises:
        BadInput: no data or no target are named, or they cannot be read.
        ConfigError: with every problem.
    """
    content, remarks = read_mapping(source) if source else {}, list[str]()
    for field, value in override_items(overrides):
        assign(content, field, value)
    data = content.setdefault("data", {})
    for field in ("source", "target"):
        if not data.get(field):
            raise BadInput(
                f"data.{field} is missing: a search needs a table and the column to predict",
                remedy="add --set data.source=[FILE] --set data.target=COLUMN",
            )
    first = data["source"] if isinstance(data["source"], str) else data["source"][0]
    content.setdefault("name", name_for(str(first)))
    if data.get("series"):
        data.setdefault("task", SERIES[0])
    framework = "mlforecast" if data.get("task") in SERIES else "lightgbm"
    content.setdefault("model", {"framework": framework, "config": {"model_type": "lightgbm"}})
    if data.get("task") not in SERIES:
        data.setdefault("validation_share", 0.1)
        data.setdefault("test_share", 0.2)
    if "task" not in data:
        # Imported late, with pyarrow.
        from steadytrain.components.automl.task import task_of

        try:
            data["task"], reason = task_of(data)
        except (BadInput, StorageError) as error:
            raise BadInput(
                f"data.task is missing, and the data cannot be read here: {error.message}",
                remedy=f"set data.task to {' or '.join(TABLES)}, or fix this: {error.remedy}",
            ) from error
        remarks.append(f"task {data['task']}, since {reason}; data.task sets another one")
    config = from_mapping(content)
    if config.data.task not in (*TABLES, *SERIES):
        raise BadInput(
            f"data.task = {config.data.task!r}: a search finds models of tables and of series",
            remedy=f"use {' or '.join((*TABLES, *SERIES))}",
        )
    return config, remarks

"""Real tables that scikit-learn ships, as CSV files, and their prepared data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from sklearn import datasets

from steadytrain.components.preprocess.step import run as preprocess
from steadytrain.components.shared.config import RunConfig, load
from steadytrain.components.shared.records import DataRecord

LINEAR = ["model.framework=sklearn", "model.config={model_type: linear}", "training.max_steps=1"]
REGRESSION = "data.task=tabular_regression"


def shipped(name: str) -> pd.DataFrame:
    """Return a table with the column `target`, whose classes are names."""
    found = getattr(datasets, f"load_{name}")(as_frame=True)
    frame = found.frame
    if "target_names" in found:
        frame["target"] = [str(found.target_names[number]) for number in found.target]
    return frame


def write_csv(folder: Path, records: pd.DataFrame | Iterable[Mapping[str, Any]]) -> Path:
    path = folder / "table.csv"
    pd.DataFrame(records).to_csv(path, index=False)
    return path


def table_config(source: Path, *overrides: str, target: str = "target") -> RunConfig:
    """Return the configuration of a run in the folder of its table."""
    return load(
        "tabular",
        [
            f"data.source=[{source}]",
            f"data.target={target}",
            f"output={source.parent / 'output'}",
            "run=table",
            *overrides,
        ],
    )


def prepared(
    folder: Path, records: pd.DataFrame | Sequence[Mapping[str, Any]], *overrides: str
) -> tuple[RunConfig, DataRecord]:
    """Write a table, and prepare it."""
    config = table_config(write_csv(folder, records), *overrides)
    return config, preprocess(config)

"""What a search predicts, if the configuration does not say: classes, numbers or sets of labels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import closing
from typing import Any, Final

from pydantic import ValidationError

from steadytrain.components.preprocess.inspection import first_rows
from steadytrain.components.preprocess.validate import no_records
from steadytrain.components.shared.config import DataConfig, from_mapping
from steadytrain.components.shared.config.data_sections import TABULAR_MULTI_LABEL
from steadytrain.components.shared.errors import DataError
from steadytrain.components.tabular.model import is_missing, level_of, plain_number
from steadytrain.components.tasks.encoding.fields import Defect

_CLASSES: Final = 20
"""Different whole numbers up to which they are the names of classes."""
_ROWS: Final = 20_000
"""Records to look at: a table may be sorted by its target."""
_STRAY: Final = 0.05
"""Share of values up to which those that are not numbers are errors."""


def task_of(data: Mapping[str, Any]) -> tuple[str, str]:
    """Return the task for the target's first values, and the reason.

    Args:
        data: the section as plain data.

    Raises:
        DataError: the records have no such column, or its values are neither classes nor numbers.
        BadInput: they cannot be read.
        ConfigError: the section has problems, all of which it lists.
    """
    several = isinstance(data["target"], list)
    if several or data.get("label_separator") is not None:
        why = "data.target names several columns" if several else "data.label_separator is set"
        return TABULAR_MULTI_LABEL, why
    config = checked({**data, "task": "tabular_classification"})
    target = str(config.target)
    values = _values(config, target)
    if not values:
        raise DataError(
            f"data.target = {target!r}: every value is missing", remedy="name another column"
        )
    lists = sum(isinstance(value, list) for value in values)
    if 2 * lists > len(values):
        return TABULAR_MULTI_LABEL, f"{target} has lists in {lists:,} of {len(values):,} records"
    if config.labels:
        return "tabular_classification", "data.labels names its classes"
    numbers = [plain_number(value) for value in values]
    other = [value for value, number in zip(values, numbers, strict=True) if math.isnan(number)]
    different = len(set(map(level_of, values)))
    fractions = any(number % 1 > 0 for number in numbers)
    if (different > _CLASSES or fractions) and len(other) <= _STRAY * len(values):
        return "tabular_regression", f"{target} has {different} different numbers"
    if different > max(_CLASSES, len(values) / 2):
        raise DataError(
            f"data.target = {target!r}: {different} of {len(values)} values are different, and "
            f"values such as {str(other[0])[:40]!r} are not numbers",
            remedy="write numbers as 1234.5 or name another column; data.task: "
            "tabular_classification takes each value for a class",
        )
    return "tabular_classification", f"{target} has {different} different values"


def _values(config: DataConfig, target: str) -> list[Any]:
    """Return the first values of a column that are not missing.

    Raises:
        DataError: there are no records, or they have no such column.
    """
    values, names, rows = list[Any](), dict[str, None](), 0
    with closing(first_rows(config, _ROWS)) as read:
        for _, _, row in read:
            rows += 1
            if isinstance(row, Defect):
                continue
            names |= dict.fromkeys(row)
            if not is_missing(row.get(target)) or row.get(target) in (config.labels or ()):
                values.append(row[target])
    if not rows:
        raise no_records(config)
    if target not in names:
        raise DataError(
            f"data.target = {target!r}: the records have no such column",
            remedy=f"use one of {', '.join(map(str, names))}"[:500],
        )
    return values


def checked(section: Mapping[str, Any]) -> DataConfig:
    """Return a section of data.

    Raises:
        ConfigError: with every problem.
    """
    try:
        return DataConfig.model_validate(section)
    except ValidationError:
        # This explains every problem.
        model = {"framework": "lightgbm", "config": {"model_type": "lightgbm"}}
        return from_mapping({"name": "table", "data": section, "model": model}).data

"""What a search predicts, if the configuration does not say: classes or numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import closing
from typing import Any, Final

from steadytrain.components.preprocess.inspection import first_rows
from steadytrain.components.shared.config import DataConfig
from steadytrain.components.shared.errors import DataError
from steadytrain.components.tabular.model import is_missing, plain_number
from steadytrain.components.tasks.encoding.fields import Defect

_CLASSES: Final = 20
"""Different numbers up to which they are the names of classes."""


def task_of(data: Mapping[str, Any]) -> tuple[str, str]:
    """Return the task for the target's first values, and the reason.

    Args:
        data: the section as plain data.

    Raises:
        DataError: the records have no such column, or it has no value.
        BadInput: they cannot be read.
    """
    config = DataConfig.model_validate({**data, "task": "tabular_classification"})
    target, values, names = str(config.target), list[Any](), dict[str, None]()
    with closing(first_rows(config)) as rows:
        for _, _, row in rows:
            if isinstance(row, Defect):
                continue
            names |= dict.fromkeys(row)
            if not is_missing(row.get(target)):
                values.append(row[target])
    if target not in names:
        raise DataError(
            f"data.target = {target!r}: the records have no such column",
            remedy=f"use one of {', '.join(map(str, names))}"[:500],
        )
    if not values:
        raise DataError(
            f"data.target = {target!r}: every value is missing", remedy="name another column"
        )
    different = len(set(map(str, values)))
    if different <= _CLASSES or any(math.isnan(plain_number(value)) for value in values):
        return "tabular_classification", f"{target} has {different} different values"
    return "tabular_regression", f"{target} has {different} different numbers"

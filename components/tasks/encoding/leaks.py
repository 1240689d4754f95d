"""Whether a column of numbers gives the target away. Nothing here imports torch."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

FEW: Final = 20
"""Values below which a column is not judged to be an identifier, text or a leak."""
ALLOW: Final = "name it in data.allow_leaks to learn from it"
_SAME: Final = 1 - 1e-9
"""Correlation from which one number is a copy of another, or a multiple."""


def function_of(clues: NDArray[np.float64], truth: NDArray[Any], *, in_time: bool = False) -> str:
    """Return how numbers are a linear or a monotone function of the target, or "".

    Args:
        in_time: whether the numbers only rise, or only fall, with time. A target with a trend is
            then a monotone function of them by that trend alone, so only a linear one is evidence.
    """
    if not clues.std() > 0 or not truth.std() > 0:
        return ""
    fit = abs(float(np.corrcoef(clues, truth)[0, 1]))
    if fit > _SAME:
        return f"it is a linear function of the target (correlation {fit:.6f})"
    if in_time:
        return ""
    order = np.argsort(clues, kind="stable")
    rises, steps = np.diff(clues[order]) > 0, np.diff(truth[order])
    # Of so many different numbers, two orders out of FEW! fit by accident.
    if rises.sum() >= FEW - 1 and any(
        (np.where(rises, sign * steps > 0, steps == 0)).all() for sign in (1, -1)
    ):
        sign = "" if steps[rises][0] > 0 else "-"
        return f"it is a monotone function of the target (rank correlation {sign}1)"
    return ""

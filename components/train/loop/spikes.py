"""Detect finite losses that training does not recover from: far out of range, undoing progress."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

_TO_SIGMA = 1.4826
"""Ratio of standard deviation to median absolute deviation in a normal distribution."""


def highest_normal_loss(
    recent: Sequence[float], first: float | None, *, threshold: float, window: int
) -> float:
    """Return the loss above which a step counts as a spike; infinite until enough steps are known.

    A spike must meet two conditions. First, the loss is more than `threshold` deviations above the
    median of the last `window` losses. This is the rule of OLMo-core's SkipStepOptimizer (window
    128, factor 6, at least half a window), but with median and median absolute deviation instead of
    mean and standard deviation, which a spike would widen (Hampel 1974). Second, the loss gives
    back more than half of the improvement since the first step. Batches differ, and one hard batch
    in a run that has settled is not a divergence.

    Args:
        recent: mean losses of the previous steps; non-finite ones are ignored.
        first: mean loss of the first step.
    """
    finite = [loss for loss in recent[-window:] if math.isfinite(loss)]
    if threshold <= 0 or first is None or len(finite) < max(2, window // 2):
        return math.inf
    middle = median(finite)
    deviation = _TO_SIGMA * median(abs(loss - middle) for loss in finite)
    return middle + max(threshold * deviation, (first - middle) / 2)

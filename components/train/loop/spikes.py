"""When a finite loss is one that no training gets over: it is far outside, and undoes learning."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

_TO_SIGMA = 1.4826
"""Of a normal distribution: standard deviation over median absolute deviation."""


def highest_normal_loss(
    recent: Sequence[float], first: float | None, *, threshold: float, window: int
) -> float:
    """The loss above which a step has spiked; infinite while too little is known.

    Both must hold for a spike. It lies more than `threshold` deviations above the median of
    the last `window` losses: the rule of OLMo-core's SkipStepOptimizer (window 128, factor 6,
    at least half a window) with median and median absolute deviation instead of mean and
    standard deviation, which a spike would widen (Hampel 1974). And it gives back more than
    half of what was learned since the first step: batches differ, and one hard batch in a
    training that has settled is no divergence.

    Args:
        recent: mean losses of steps before this one; those that are not finite do not count.
        first: mean loss of the first step.
    """
    finite = [loss for loss in recent[-window:] if math.isfinite(loss)]
    if threshold <= 0 or first is None or len(finite) < max(2, window // 2):
        return math.inf
    middle = median(finite)
    deviation = _TO_SIGMA * median(abs(loss - middle) for loss in finite)
    return middle + max(threshold * deviation, (first - middle) / 2)

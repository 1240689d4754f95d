"""Metrics that sum over tokens or errors, and one that needs complete samples."""

import math

import numpy as np

from steadytrain.components.evaluate.metric import MeanMetric, SampleMetric

BITS_PER_TOKEN = MeanMetric(
    greater_is_better=False,
    parts=lambda scores: (scores.loss / math.log(2), scores.targets),
)
MEDIAN_LOSS = SampleMetric(
    greater_is_better=False,
    of=lambda scores: float(np.median(scores.loss[scores.targets > 0])),
)
RMSE = MeanMetric(
    greater_is_better=False,
    parts=lambda scores: (
        (np.square(scores.columns["error"]), scores.targets) if "error" in scores.columns else None
    ),
    finish=np.sqrt,
)

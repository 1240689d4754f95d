"""What a search promises of records in groups: they count as many times as there are groups."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from steadytrain.components.automl.board import _difference
from steadytrain.components.automl.unit_scores import out_of_fold

GROUPS, COPIES = 60, 5


def scores(own, groups):
    """Return the joined scores of records of class 1."""
    count = len(own)
    return pa.table(
        {
            "id": [f"{place:04}" for place in range(count)],
            "group": pa.array(groups, pa.string()),
            "label": np.ones(count, np.int64),
            "probabilities": pa.array(np.stack([1 - own, own], 1).tolist(), pa.list_(pa.float32())),
            "fold": np.arange(count) * 4 // count,
        }
    )


def gain(own, groups):
    """Return how much better one configuration is than another that flips coins, and the units."""
    found = out_of_fold([scores(own, groups), scores(np.full(len(own), 0.5), groups)])
    losses = [found.losses(each) for each in found.predicted]
    return _difference(losses[1] - losses[0], found), len({*found.units.tolist()})


def test_interval_of_a_gain_counts_groups_and_not_their_records():
    own = np.random.default_rng(0).uniform(0.3, 0.95, GROUPS)
    alone, units = gain(own, [None] * GROUPS)
    names = [f"group {place}" for place in np.repeat(np.arange(GROUPS), COPIES)]
    together, units_together = gain(np.repeat(own, COPIES), names)
    assert units == units_together == GROUPS
    assert (together.low, together.high) == pytest.approx((alone.low, alone.high))
    apart, units_apart = gain(np.repeat(own, COPIES), [None] * GROUPS * COPIES)
    assert units_apart == GROUPS * COPIES
    width, least = together.high - together.low, apart.high - apart.low
    assert width > 1.8 * least
    few, _ = gain(own, [f"group {place % 4}" for place in range(GROUPS)])
    assert np.isnan(few.low)

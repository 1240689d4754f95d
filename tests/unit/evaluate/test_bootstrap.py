"""The bootstrap is seeded, samples complete groups, and its intervals have the stated coverage."""

import numpy as np
import pytest

from steadytrain.components.evaluate import bootstrap
from steadytrain.components.evaluate.bootstrap import Resampling, replicate, units_of


def mean_of(values):
    return lambda weights: {"mean": weights @ values / weights.sum(axis=1)}


def test_ungrouped_examples_are_their_own_units():
    units = units_of(["a", None, "a", None, "1"])
    assert units[0] == units[2]
    assert len(set(units.tolist())) == 4


def test_equal_seeds_give_equal_replicates_and_others_differ():
    values, units = np.arange(50.0), np.arange(50)
    first, again, other = (
        replicate(mean_of(values), units, Resampling(200, 0.95, seed))["mean"] for seed in (1, 1, 2)
    )
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_replicates_do_not_depend_on_how_many_are_computed_at_once(monkeypatch):
    values, units = np.arange(40.0), np.arange(40)
    how = Resampling(100, 0.95, 3)
    whole = replicate(mean_of(values), units, how)["mean"]
    monkeypatch.setattr(bootstrap, "_CELLS", 40 * 7)
    assert np.array_equal(replicate(mean_of(values), units, how)["mean"], whole)


def test_groups_are_resampled_whole():
    units = np.array([0, 0, 0, 1, 2, 2])
    seen = []

    def statistic(weights):
        seen.append(weights)
        return {"total": weights.sum(axis=1)}

    replicate(statistic, units, Resampling(100, 0.9, 0))
    weights = np.concatenate(seen)
    for unit in range(3):
        inside = weights[:, units == unit]
        assert (inside == inside[:, :1]).all()
    # Each resample draws three units, whatever their size.
    assert (weights[:, [0, 3, 4]].sum(axis=1) == 3).all()


def test_interval_coverage_matches_the_confidence_level():
    random = np.random.default_rng(0)
    hits = 0
    for trial in range(300):
        values = random.exponential(size=60)
        how = Resampling(300, 0.9, trial)
        interval = how.interval(
            values.mean(), replicate(mean_of(values), np.arange(60), how)["mean"]
        )
        hits += interval.low <= 1.0 <= interval.high
    assert 0.83 < hits / 300 < 0.95


def test_grouped_examples_give_wider_intervals():
    random = np.random.default_rng(0)
    groups = np.repeat(np.arange(30), 20)
    values = random.normal(size=30)[groups]
    how = Resampling(500, 0.95, 0)

    def width(units):
        interval = how.interval(0.0, replicate(mean_of(values), units, how)["mean"])
        return interval.high - interval.low

    assert width(groups) > 3 * width(np.arange(600))


@pytest.mark.parametrize("replicates", [[np.nan, 1.0, 3.0, np.inf], [1.0, 3.0]])
def test_undefined_replicates_are_left_out(replicates):
    interval = Resampling(100, 0.9, 0).interval(2.0, np.array(replicates))
    assert (interval.low, interval.high) == pytest.approx((1.1, 2.9))


def test_interval_is_the_value_without_defined_replicates():
    interval = Resampling(100, 0.9, 0).interval(2.0, np.array([np.nan]))
    assert (interval.low, interval.value, interval.high) == (2.0, 2.0, 2.0)

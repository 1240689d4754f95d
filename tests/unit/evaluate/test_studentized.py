"""The interval of a difference keeps its level, also for few units, and agrees with SciPy."""

import math

import numpy as np
import pytest

from steadytrain.components.evaluate import bootstrap as module
from steadytrain.components.evaluate.bootstrap import (
    count_units,
    fewest_units,
    studentized,
    studentized_ratio,
)


def mean_of(values):
    return lambda weights: {"": weights @ values / weights.sum(axis=1)}


def interval(values, units=None, confidence=0.95, statistic=mean_of):
    given = np.arange(len(values)) if units is None else units
    return studentized(statistic(values), given, confidence)[""]


@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.9999])
def test_interval_of_a_symmetric_mean_is_barely_wider_than_students(confidence):
    from scipy import stats

    half = np.random.default_rng(0).standard_t(4, 400)
    values = np.concatenate([half, -half]) + 0.1
    found = interval(values, confidence=confidence)
    theirs = stats.ttest_1samp(values, 0).confidence_interval(confidence)
    width = theirs.high - theirs.low
    assert theirs.low - 0.06 * width <= found.low <= theirs.low
    assert theirs.high <= found.high <= theirs.high + 0.06 * width


def test_interval_of_a_skewed_mean_is_near_scipys_bca():
    """Of 500 values, all second-order correct methods agree on the end in the direction of skew."""
    from scipy import stats

    values = np.random.default_rng(1).exponential(size=500)
    found = interval(values)
    theirs = stats.bootstrap(
        (values,), np.mean, n_resamples=20_000, method="BCa", rng=np.random.default_rng(2)
    ).confidence_interval
    width = theirs.high - theirs.low
    assert found.high == pytest.approx(theirs.high, abs=0.06 * width)
    assert found.low <= theirs.low + 0.02 * width
    assert found.low == pytest.approx(theirs.low, abs=0.06 * width)


def test_interval_of_a_ratio_is_near_scipys_bca():
    from scipy import stats

    random = np.random.default_rng(3)
    weights = random.integers(50, 500, 300).astype(float)
    sums = weights * random.lognormal(0, 0.2, 300)
    found = studentized(lambda w: {"": w @ sums / (w @ weights)}, np.arange(300), 0.95)[""]
    theirs = stats.bootstrap(
        (sums, weights),
        lambda a, b, axis: a.sum(axis) / b.sum(axis),
        paired=True,
        vectorized=True,
        n_resamples=20_000,
        method="BCa",
        rng=np.random.default_rng(4),
    ).confidence_interval
    width = theirs.high - theirs.low
    assert found.low == pytest.approx(theirs.low, abs=0.06 * width)
    assert found.high == pytest.approx(theirs.high, abs=0.06 * width)


def improvement(candidate, champion, confidence=0.95):
    def parts(weights):
        count = weights.sum(axis=1)
        return {
            "gain": weights @ (candidate - champion) / count,
            "scale": weights @ champion / count,
        }

    return studentized_ratio(parts, np.arange(len(candidate)), confidence)


@pytest.mark.slow
def test_relative_improvement_of_few_units_has_an_end_near_fiellers():
    """32 of 33 right against 13 of 33: the interval of the quotient itself began below 0."""
    from scipy import stats

    candidate, champion = (np.arange(33) != 5) * 1.0, (np.arange(33) < 13) * 1.0
    found = improvement(candidate, champion)

    def distance(ratio):
        return stats.ttest_1samp(candidate - champion - ratio * champion, 0).pvalue

    ratios = np.linspace(-0.9, 9, 2000)
    inside = ratios[[distance(ratio) > 0.05 for ratio in ratios]]
    assert found.value == pytest.approx(19 / 13)
    assert 0.5 < found.low <= inside.min() + 0.005
    assert inside.max() - 0.005 <= found.high < 4


def test_ratio_to_what_can_be_zero_by_chance_keeps_an_interval():
    random = np.random.default_rng(0)
    found = improvement(random.normal(0.1, 1, 60), random.normal(0.05, 1, 60))
    assert found.low < found.value < found.high


def test_equal_models_improve_nothing():
    values = np.random.default_rng(1).exponential(size=40)
    found = improvement(values, values)
    assert found.value == 0
    assert found.low == pytest.approx(0, abs=1e-5)
    assert found.low <= 0 <= found.high


@pytest.mark.slow
@pytest.mark.parametrize("chance", [0.4, 0.9])
def test_level_holds_for_a_relative_improvement(chance):
    random, found = np.random.default_rng(2), 0
    for _ in range(500):
        candidate, champion = (random.random((2, 30)) < chance) * 1.0
        found += improvement(candidate, champion).low > 0
    assert found / 500 < 0.043


def test_units_count_as_a_whole():
    values = np.random.default_rng(5).normal(size=60)
    groups, repeated = np.repeat(np.arange(60), 7), np.repeat(values, 7)
    assert interval(repeated, groups).low == pytest.approx(interval(values).low)
    assert interval(repeated).low > interval(values).low


def test_blocks_of_units_give_nearly_the_same_interval(monkeypatch):
    values = np.random.default_rng(6).normal(size=900)
    exact = interval(values)
    monkeypatch.setattr(module, "_BLOCKS", 100)
    found = interval(values)
    assert found.value == exact.value
    assert found.high - found.low == pytest.approx(exact.high - exact.low, rel=0.15)


def test_interval_does_not_depend_on_how_much_is_computed_at_once(monkeypatch):
    values = np.random.default_rng(7).normal(size=50)
    exact = interval(values)
    monkeypatch.setattr(module, "_CELLS", 120)
    assert interval(values).low == pytest.approx(exact.low, rel=1e-9)


@pytest.mark.parametrize("values", [[1.0], [1.0, math.inf], [1.0, -math.inf, 2.0]])
def test_values_that_prove_nothing_have_no_ends(values):
    with np.errstate(all="ignore"):
        found = interval(np.array(values))
    assert math.isnan(found.low)
    assert math.isnan(found.high)


def test_statistic_that_rests_on_one_unit_has_no_interval():
    values = np.random.default_rng(8).normal(size=40)

    def statistic(weights):
        means = weights @ values / weights.sum(axis=1)
        return {"": np.where(weights[:, 0] == 0, np.nan, means)}

    found = studentized(statistic, np.arange(40), 0.95)[""]
    assert math.isfinite(found.value)
    assert math.isnan(found.low)
    assert math.isnan(found.high)


def test_negative_units_are_no_evidence():
    """Of 40 values, 10 have weight. The interval has 9 degrees of freedom, not 39."""
    values = np.random.default_rng(9).normal(size=40)
    inside = np.arange(40) < 10
    units = np.where(inside, np.arange(40), -1)
    found = studentized(
        lambda w: {"": w @ (values * inside) / (w @ inside.astype(float))}, units, 0.95
    )[""]
    alone = interval(values[:10])
    assert (found.low, found.high) == pytest.approx((alone.low, alone.high))
    assert count_units(units) == 10


def test_samples_without_a_unit_have_no_interval():
    found = interval(np.ones(3), np.full(3, -1))
    assert math.isnan(found.low)


def test_level_that_rounds_to_one_is_possible():
    assert fewest_units(1 - 0.05 / 1e19) == 54
    found = interval(np.random.default_rng(10).normal(size=40), confidence=1.0)
    assert -math.inf < found.low < found.high < math.inf


def test_sign_test_needs_six_units():
    assert [fewest_units(level) for level in (0.95, 0.975, 0.9999)] == [6, 7, 15]


SHAPES = {
    "normal": lambda random, size: random.normal(size=size),
    "t with 3 degrees": lambda random, size: random.standard_t(3, size),
    "Cauchy": lambda random, size: random.standard_cauchy(size),
    "one in ten differs": lambda random, size: random.choice(
        [-1.0, 0, 1], p=[0.05, 0.9, 0.05], size=size
    ),
    "skewed up": lambda random, size: random.exponential(size=size) - 1,
    "skewed down": lambda random, size: 1 - random.exponential(size=size),
}


def wrong(shape, count, trials=4000, per_unit=1):
    """Return how often noise is called an improvement, at a level of 2.5 % for one end."""
    random = np.random.default_rng(count)
    found = 0
    for _ in range(trials):
        values = SHAPES[shape](random, count)
        if per_unit > 1:
            values = np.repeat(values, per_unit) + random.normal(size=count * per_unit)
        found += interval(values, np.repeat(np.arange(count), per_unit)).low > 0
    return found / trials


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_noise_is_rarely_called_an_improvement(shape):
    assert wrong(shape, 30, 2000) < 0.034


@pytest.mark.long
@pytest.mark.parametrize("count", [6, 8, 12, 30, 50, 100, 500])
@pytest.mark.parametrize("shape", SHAPES)
def test_level_holds_for_every_number_of_units(shape, count):
    assert wrong(shape, count) < 0.032


def median_of(values):
    """Return the weighted median of each row of weights, which are 0 or 1."""

    def statistic(weights):
        rows = np.sort(np.where(weights > 0, values, np.inf), axis=1)
        count = weights.sum(axis=1).astype(int)
        middle = np.stack([(count - 1) // 2, count // 2], axis=1)
        return {"": np.take_along_axis(rows, middle, axis=1).mean(axis=1)}

    return statistic


@pytest.mark.slow
@pytest.mark.parametrize("count", [30, 100])
def test_level_holds_for_a_median(count):
    """One unit moves a median to its neighbor: the jackknife alone called 13 % of noise better.

    For a mean, random halves say the same as the jackknife and change nothing.
    """
    random, found = np.random.default_rng(count), 0
    for _ in range(400):
        found += interval(random.normal(size=count), statistic=median_of).low > 0
    assert found / 400 < 0.05


@pytest.mark.parametrize("count", [30])
def test_level_holds_for_groups(count):
    assert wrong("normal", count, 1000, per_unit=5) < 0.037

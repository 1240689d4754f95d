"""What the gate never does, for any scores: any sign, any direction, any damage."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from pydantic import ValidationError

from steadytrain.components.evaluate.gate import Gate, TestSide
from steadytrain.components.shared.config import GateConfig
from steadytrain.components.shared.records import Comparison, GateRecord, Interval, Subject

from support.means import DIRECTIONS, Means

SUBJECT = Subject(
    run_id="run", model_name="shapes", champion_alias="champion", weights_digest="mine", rules="r"
)
COUNT = 12
TEST = TestSide(np.arange(COUNT))
FEW = {"min_slice_examples": 1, "min_units": 2}
METRICS = st.sampled_from(sorted(DIRECTIONS))
SCORES = arrays(np.float64, COUNT, elements=st.floats(-1e6, 1e6, width=32))
ANY = st.floats(allow_nan=True, allow_infinity=True)
BROKEN = st.sampled_from([math.nan, math.inf, -math.inf])


def pair_of(candidate, champion, weights=None, slices=None):
    return Means(
        version="3",
        digest="theirs",
        candidate=candidate,
        champion=champion,
        weights=np.ones(COUNT) if weights is None else weights,
        units=np.arange(COUNT),
        slices=slices or {},
    )


def decide(metric, pair, **limits):
    with np.errstate(all="ignore"):
        value = pair.value
    gate = Gate(SUBJECT, GateConfig(**FEW | limits), metric, 0.9, DIRECTIONS, TEST)
    return gate.decide({metric: value}, pair.pair)


def shifted(champion, by):
    """Return a candidate that is better on each example by a share of the champion's mean size."""
    return champion + by * np.abs(champion).mean()


@pytest.mark.parametrize("metric", sorted(DIRECTIONS))
@pytest.mark.parametrize("around", [-3.0, 3.0])
def test_better_is_promoted_and_worse_never_whatever_the_sign(metric, around):
    sign = 1 if DIRECTIONS[metric] else -1
    champion = around + np.linspace(-0.1, 0.1, COUNT)
    better = decide(metric, pair_of(shifted(champion, 0.1 * sign), champion))
    assert better.promoted
    assert better.improvement.value == pytest.approx(0.1, rel=0.01)
    worse = decide(metric, pair_of(shifted(champion, -0.1 * sign), champion))
    assert not worse.promoted
    assert worse.improvement.value == pytest.approx(-0.1, rel=0.01)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    metric=METRICS, candidate=SCORES, champion=SCORES, margin=st.floats(0, 2), shift=st.floats(0, 3)
)
def test_no_worse_model_is_ever_promoted(metric, candidate, champion, margin, shift):
    sign = 1 if DIRECTIONS[metric] else -1
    decision = decide(metric, pair_of(candidate + sign * shift, champion), margin=margin)
    if decision.promoted:
        mine, theirs = math.fsum(candidate + sign * shift) / COUNT, math.fsum(champion) / COUNT
        size = abs(theirs) or 1.0
        assert sign * (mine - theirs) >= margin * size - 1e-6 * (1 + abs(mine) + abs(theirs))


@settings(max_examples=60, deadline=None)
@given(metric=METRICS, champion=SCORES, weights=arrays(np.float64, COUNT, elements=ANY))
def test_model_is_no_better_than_itself_whatever_the_weights(metric, champion, weights):
    assert not decide(metric, pair_of(champion, champion, weights)).promoted


@settings(max_examples=100, deadline=None)
@given(
    metric=METRICS,
    place=st.sampled_from(["candidate", "champion", "weights"]),
    row=st.integers(0, COUNT - 1),
    value=BROKEN,
    champion=SCORES,
)
def test_any_non_finite_number_blocks_promotion(metric, place, row, value, champion):
    sign = 1 if DIRECTIONS[metric] else -1
    parts = {
        "candidate": champion + sign * 1e7,
        "champion": champion.copy(),
        "weights": np.ones(COUNT),
    }
    parts[place][row] = value
    decision = decide(metric, pair_of(**parts), max_slice_regression=0.5)
    assert not decision.promoted
    assert "finite" in decision.reason or place == "weights"


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    metric=METRICS,
    candidate=arrays(np.float64, COUNT, elements=ANY),
    champion=arrays(np.float64, COUNT, elements=ANY),
    weights=arrays(np.float64, COUNT, elements=ANY),
)
def test_decision_on_any_scores_round_trips(metric, candidate, champion, weights):
    decision = decide(
        metric, pair_of(candidate, champion, weights, {"few": np.arange(3)}), max_slice_regression=0
    )
    again = GateRecord.model_validate_json(decision.model_dump_json())
    assert again.promoted is decision.promoted
    if decision.promoted:
        assert np.isfinite([*candidate, *champion, *weights]).all()
        sign = 1 if DIRECTIONS[metric] else -1
        assert sign * (decision.candidate - decision.champion) > 0


@settings(max_examples=60, deadline=None)
@given(metric=METRICS, value=ANY, floor=st.floats(allow_nan=False, allow_infinity=False))
def test_floor_holds_for_any_number(metric, value, floor):
    gate = Gate(SUBJECT, GateConfig(floors={metric: floor}, **FEW), metric, 0.9, DIRECTIONS, TEST)
    promoted = gate.decide({metric: value}, None).promoted
    held = value >= floor if DIRECTIONS[metric] else value <= floor
    assert promoted is (held and math.isfinite(value))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", ["margin", "max_slice_regression", "floors"])
def test_non_finite_limit_blocks_promotion(field, value):
    given_limit = {"accuracy": value} if field == "floors" else value
    with pytest.raises(ValidationError, match="finite"):
        GateConfig(**{field: given_limit})
    # Even if such a limit gets through validation:
    limits = GateConfig.model_construct(**(GateConfig(**FEW).model_dump() | {field: given_limit}))
    for metric in ("accuracy", "loss"):
        gate = Gate(SUBJECT, limits, metric, 0.9, DIRECTIONS, TEST)
        assert not gate.decide({metric: 0.9, "accuracy": 0.9}, None).promoted
        champion = np.full(COUNT, 0.5)
        better = champion + (0.4 if metric == "accuracy" else -0.4)
        found = gate.decide({metric: 0.9, "accuracy": 0.9}, pair_of(better, champion).pair)
        assert not found.promoted


def test_overflow_blocks_promotion():
    champion = np.full(COUNT, 1e308)
    decision = decide("loss", pair_of(champion / 2, champion))
    assert not decision.promoted
    assert "finite" in decision.reason


GOOD = {
    "subject": SUBJECT, "promoted": True, "reason": "promoted", "metric": "accuracy",
    "greater_is_better": True, "candidate": 0.9, "champion": 0.8, "champion_version": "3",
    "improvement": Interval(value=0.1, low=0.05, high=0.2), "margin": 0.0,
}  # fmt: skip
NONE = Interval(value=0.1, low=-0.01, high=0.2)
BASELINE = Comparison(
    what="the naive baseline",
    metric="accuracy",
    candidate=0.9,
    other=0.8,
    improvement=GOOD["improvement"],
)


@pytest.mark.parametrize(
    "change",
    [
        {"champion": None},
        {"improvement": None},
        {"improvement": Interval(value=-0.1, low=-0.2, high=0.0)},
        {"improvement": Interval(value=-0.1, low=0.2, high=0.3)},
        {"improvement": Interval(value=math.nan, low=math.nan, high=math.nan)},
        {"improvement": Interval(value=math.inf, low=math.inf, high=math.inf)},
        {"margin": 0.2},
        {"margin": math.nan},
        {"candidate": math.nan},
        {"champion": math.inf},
        {"floors": {"accuracy": 0.95}},
        {"floors": {"accuracy": math.nan}},
        {"greater_is_better": False, "floors": {"accuracy": 0.85}},
        {"slices": {"few": math.nan}},
        {"undecided": True},
        {"comparisons": [BASELINE.model_copy(update={"improvement": NONE})]},
    ],
)
def test_inconsistent_promotion_record_is_rejected(change):
    assert GateRecord(**GOOD, comparisons=[BASELINE]).promoted
    assert not GateRecord(**GOOD | change | {"promoted": False}).promoted
    with pytest.raises(ValidationError, match="promoted"):
        GateRecord(**GOOD | change)

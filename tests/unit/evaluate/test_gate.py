"""The gate's decisions, on tables of cases and on simulated paired scores."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from steadytrain.components.evaluate.gate import Gate, TestSide
from steadytrain.components.evaluate.metric import Pair, Rival, Scores, metrics
from steadytrain.components.evaluate.step import _summary
from steadytrain.components.shared.config import GateConfig
from steadytrain.components.shared.records import (
    EvaluationRecord,
    GateRecord,
    Interval,
    Subject,
)

from support.evaluating import class_table
from support.means import DIRECTIONS, Means

SUBJECT = Subject(
    run_id="run", model_name="shapes", champion_alias="champion", weights_digest="mine", rules="r"
)
TEST = TestSide(np.arange(200), "digest")


def gate(metric="bits_per_byte", test=TEST, **limits):
    return Gate(SUBJECT, GateConfig(**limits), metric, 0.95, DIRECTIONS, test)


def language_pair(better_by, *, count=200, noise=0.02, slices=None, units=None, seed=0):
    """Return two models whose losses vary a lot between examples but little between the models."""
    random = np.random.default_rng(seed)
    size = random.integers(100, 2000, size=count).astype(float)
    champion = size * 2.5 * random.lognormal(sigma=0.5, size=count)
    candidate = champion * (1 - better_by) * (1 + noise * random.normal(size=count))
    return Means(
        version="3",
        digest="theirs",
        candidate=candidate,
        champion=champion,
        weights=size,
        units=np.arange(count) if units is None else units,
        slices=slices or {},
    )


def decide(pair, metric="bits_per_byte", **limits):
    return gate(metric, TestSide(pair.units), **limits).decide({metric: pair.value}, pair.pair)


@pytest.mark.parametrize(
    ("metric", "value", "floors", "promoted", "words"),
    [
        ("accuracy", 0.9, {}, True, "accuracy 0.9, and there is no champion yet"),
        ("accuracy", 0.9, {"accuracy": 0.9}, True, "no champion yet"),
        ("accuracy", 0.7, {"accuracy": 0.8}, False, "accuracy 0.7 is below its floor 0.8"),
        ("bits_per_byte", 2.0, {"bits_per_byte": 2.5}, True, "no champion yet"),
        (
            "bits_per_byte",
            3.0,
            {"bits_per_byte": 2.5},
            False,
            "bits per byte 3 is above its limit 2.5",
        ),
        ("accuracy", 0.9, {"auroc": 0.5}, False, "auroc has a floor of 0.5 and is not measured"),
    ],
)
def test_only_floors_decide_without_a_champion(metric, value, floors, promoted, words):
    decision = gate(metric, floors=floors).decide({metric: value}, None)
    assert decision.promoted is promoted
    assert words in decision.reason
    assert decision.champion is None
    assert decision.floors == floors


def test_real_improvement_is_found_and_reported_with_its_numbers():
    decision = decide(language_pair(0.05))
    assert decision.promoted
    assert decision.improvement.low > 0.04
    assert decision.improvement.high < 0.06
    assert decision.champion_version == "3"
    assert decision.candidate < decision.champion
    assert decision.reason.startswith("promoted: bits per byte ")
    assert "of version 3, 5." in decision.reason or "of version 3, 4.9" in decision.reason
    assert "% better (97.5 % interval" in decision.reason


def test_pairing_finds_a_difference_hidden_by_example_variance():
    pair = language_pair(0.01, noise=0.02)
    assert decide(pair).promoted
    shuffled = np.random.default_rng(1).permutation(len(pair.weights))
    unpaired = Means(
        "3",
        "theirs",
        pair.candidate,
        (pair.champion / pair.weights)[shuffled] * pair.weights,
        pair.weights,
        pair.units,
        {},
    )
    assert not decide(unpaired).promoted


def test_area_under_the_curve_of_one_positive_example_promotes_nothing():
    """All 39 negative examples depend on the same positive one."""
    label = (np.arange(40) == 0).astype(int)
    ours, theirs = (np.stack([1 - p, p], axis=1) for p in np.full((2, 40), 0.5))
    ours[0] = 0.1, 0.9
    theirs[0] = 0.9, 0.1
    auroc = metrics()["auroc"]
    candidate, champion = (
        Scores.of(class_table(label, found + np.linspace(0, 0.01, 40)[:, None] * [-1, 1]))
        for found in (ours, theirs)
    )
    pair = Pair(
        "3",
        "theirs",
        partial(auroc.resampled, candidate),
        partial(auroc.resampled, champion),
        candidate.counted_units,
        {},
    )
    decision = gate("auroc", TestSide(pair.units)).decide({"auroc": 1.0}, pair)
    assert not decision.promoted
    assert "undefined without one of the test examples" in decision.reason


def test_examples_with_nothing_to_predict_are_no_evidence():
    pair = language_pair(0.3)
    units = np.where(np.arange(200) < 29, pair.units, -1)
    counted = replace(pair, units=units)
    assert decide(pair).promoted
    few = decide(counted)
    assert few.undecided
    assert "29 independent test examples are too few" in few.reason


def test_largest_number_of_compared_configurations_is_possible():
    decision = decide(language_pair(0.3), compared=2**62)
    assert decision.promoted
    assert decide(language_pair(0.3, count=50), compared=2**62).undecided


@pytest.mark.slow
def test_models_without_a_difference_are_rarely_promoted():
    promoted = sum(decide(language_pair(0.0, seed=seed)).promoted for seed in range(100))
    assert promoted <= 4


def test_same_model_is_not_better_than_itself():
    decision = decide(language_pair(0.0, noise=0.0))
    assert not decision.promoted
    assert "lower end does not exceed the margin" in decision.reason


@pytest.mark.parametrize(("margin", "promoted"), [(0.0, True), (0.03, True), (0.06, False)])
def test_margin_must_be_exceeded_by_the_lower_end(margin, promoted):
    decision = decide(language_pair(0.05), margin=margin)
    assert decision.promoted is promoted
    assert decision.margin == margin


def test_accuracy_is_better_when_it_is_greater():
    random = np.random.default_rng(0)
    hits = (random.random(500) < 0.9).astype(float)
    worse = np.where(np.arange(500) < 60, 0.0, hits)
    ones, units = np.ones(500), np.arange(500)
    better = decide(Means("1", "theirs", hits, worse, ones, units, {}), "accuracy")
    assert better.promoted
    assert better.greater_is_better
    back = decide(Means("1", "theirs", worse, hits, ones, units, {}), "accuracy")
    assert not back.promoted
    assert back.improvement.value < 0
    assert "% worse" in back.reason


def test_champion_that_is_always_wrong_is_compared_by_the_difference():
    ones, units = np.ones(50), np.arange(50)
    decision = decide(Means("1", "theirs", ones, np.zeros(50), ones, units, {}), "accuracy")
    assert decision.promoted
    assert decision.improvement.value == 1.0


def test_evidence_counts_groups_not_examples():
    units = np.repeat(np.arange(40), 25)
    random = np.random.default_rng(4)
    drift = random.normal(scale=0.1, size=40)[units]
    weights = np.ones(1000)
    champion = np.full(1000, 2.0)
    candidate = champion * (0.985 + drift - drift.mean())
    alone = Means("1", "theirs", candidate, champion, weights, np.arange(1000), {})
    grouped = Means("1", "theirs", candidate, champion, weights, units, {})
    assert decide(alone).promoted
    assert not decide(grouped).promoted


@pytest.mark.parametrize(("count", "promoted"), [(1, False), (29, False), (30, True)])
@pytest.mark.parametrize("first", [True, False])
def test_few_examples_leave_the_candidate_undecided(count, promoted, first):
    pair = language_pair(0.5, count=count, noise=0.0)
    made = gate(test=TestSide(pair.units))
    decision = made.decide({"bits_per_byte": pair.value}, None if first else pair.pair)
    assert decision.promoted is promoted
    assert decision.undecided is not promoted
    assert decision.units == count
    if not promoted:
        assert decision.reason.startswith("undecided: bits per byte ")
        assert f"{count} independent test examples are too few to tell (30 need" in decision.reason
        assert "data.test_share" in decision.reason


def test_floor_that_is_missed_decides_however_few_the_examples():
    pair = language_pair(0.5, count=5)
    decision = decide(pair, floors={"bits_per_byte": 0.1})
    assert not decision.undecided
    assert decision.reason.startswith("not promoted: ")


def test_small_level_needs_more_examples():
    """Even a unanimous result among 30 is not enough for the 10,000th model."""
    pair = language_pair(0.5, count=30, noise=0.0)
    late = gate(test=TestSide(pair.units, earlier=9_999))
    decision = late.decide({"bits_per_byte": pair.value}, pair.pair)
    assert "30 independent test examples are too few to tell (32 needed)" in decision.reason


def test_constant_advantage_below_the_margin_is_not_promoted():
    pair = language_pair(0.0, noise=0.0)
    tiny = replace(pair, candidate=pair.champion * (1 - 1e-10))
    assert not decide(tiny).promoted
    assert decide(replace(pair, candidate=pair.champion * (1 - 2e-3))).promoted


@pytest.mark.parametrize(
    ("compared", "earlier", "level"),
    [(1, 0, 0.975), (10, 0, 0.9975), (1, 1, 1 - 0.05 / 6), (5, 3, 0.9995)],
)
def test_level_accounts_for_the_search_and_for_earlier_models(compared, earlier, level):
    pair = language_pair(0.05)
    made = gate(test=TestSide(pair.units, earlier=earlier), compared=compared)
    decision = made.decide({"bits_per_byte": pair.value}, pair.pair)
    assert decision.confidence == pytest.approx(level)
    assert (decision.compared, decision.earlier) == (compared, earlier)
    assert f"({100 * level:.4g} % interval" in decision.reason


def test_all_models_on_one_test_side_share_the_probability_of_a_wrong_promotion():
    levels = [gate(test=TestSide(np.arange(40), earlier=k)).level for k in range(10_000)]
    assert 0.0499 < sum(1 - level for level in levels) < 0.05


def test_improvement_that_one_model_shows_is_no_proof_for_the_hundredth():
    pair = language_pair(0.006, seed=3)
    decisions = [
        gate(test=TestSide(pair.units, earlier=earlier)).decide(
            {"bits_per_byte": pair.value}, pair.pair
        )
        for earlier in (0, 100)
    ]
    assert [item.promoted for item in decisions] == [True, False]


def rival(pair, value):
    mine = pair.pair.candidate
    return Rival(
        "the naive baseline", "bits_per_byte", mine, lambda weights: np.full(len(weights), value)
    )


@pytest.mark.parametrize("first", [True, False])
def test_candidate_that_does_not_beat_the_baseline_is_not_promoted(first):
    pair = language_pair(0.05)
    given = {"bits_per_byte": pair.value}, None if first else pair.pair
    good = gate().decide(*given, [rival(pair, 2 * pair.value)])
    assert good.promoted
    assert good.comparisons[0].other == pytest.approx(2 * pair.value)
    assert good.comparisons[0].improvement.value == pytest.approx(0.5)
    for value in (pair.value / 2, pair.value * 1.001):
        decision = gate().decide(*given, [rival(pair, value)])
        assert not decision.promoted
        assert not decision.undecided
        assert "not shown to be better than the naive baseline" in decision.reason


def test_reason_names_the_baseline_if_there_is_no_champion():
    pair = language_pair(0.05)
    decision = gate().decide({"bits_per_byte": 2.0}, None, [rival(pair, 2 * pair.value)])
    assert "50.0 % better than the naive baseline, and there is no champion yet" in decision.reason


def sliced(worse_by):
    pair = language_pair(0.3)
    rows = {"code": np.arange(150), "prose": np.arange(150, 190), "few": np.arange(190, 200)}
    candidate = pair.candidate.copy()
    candidate[150:] = pair.champion[150:] * (1 + worse_by)
    return Means("3", "theirs", candidate, pair.champion, pair.weights, pair.units, rows)


def test_slice_that_gets_worse_stops_a_better_model():
    decision = decide(sliced(0.2), max_slice_regression=0.05)
    assert not decision.promoted
    assert "slice 'prose' is 20.0 % worse (limit 5 %)" in decision.reason
    assert decision.slices["prose"] == pytest.approx(-0.2)
    assert decision.slices["code"] > 0


def test_small_slices_do_not_decide():
    decision = decide(sliced(0.2), max_slice_regression=0.05, min_slice_examples=20)
    assert "few" not in decision.slices


@pytest.mark.parametrize("limits", [{}, {"max_slice_regression": 0.3}])
def test_slices_decide_only_beyond_their_limit(limits):
    assert decide(sliced(0.2), **limits).promoted


def test_every_objection_is_named():
    decision = decide(sliced(0.6), max_slice_regression=0.05, floors={"bits_per_byte": 0.1})
    assert not decision.promoted
    assert decision.reason.count(" and ") == 2


def test_unfair_comparison_blocks_promotion():
    decision = gate("accuracy").refuse({"accuracy": 0.99}, "version 2 has other labels", "2")
    assert not decision.promoted
    assert decision.reason == "not promoted: accuracy 0.99, but version 2 has other labels"
    assert decision.champion_version == "2"
    assert decision.champion is None


def test_floor_of_an_unknown_metric_is_a_configuration_error():
    with pytest.raises(ValueError, match=r"bleu in steadytrain\.metrics: use one of accuracy"):
        GateConfig(floors={"bleu": 0.3})


def accuracy_pair(*worse, count=400):
    """Return two classifiers of two parts. The candidate is better, but gets `worse` wrong."""
    champion = np.arange(count) % 4 != 0
    candidate = np.ones(count)
    candidate[list(worse)] = 0
    slices = {"mood": np.arange(count - 40, count), "topic": np.arange(count - 40)}
    return Means(
        version="3",
        digest="theirs",
        candidate=candidate,
        champion=champion.astype(float),
        weights=np.ones(count),
        units=np.arange(count),
        slices=slices,
    )


def decide_parts(pair, **limits):
    parts = ["mood", "topic"]
    test = TestSide(pair.units)
    made = Gate(SUBJECT, GateConfig(**limits), "accuracy", 0.95, DIRECTIONS, test, parts)
    return made.decide({"accuracy": pair.value}, pair.pair)


def test_candidate_that_is_better_in_every_part_is_promoted():
    assert decide_parts(accuracy_pair(), max_slice_regression=0.02).promoted


def test_candidate_that_is_worse_in_one_part_is_not_promoted():
    decision = decide_parts(accuracy_pair(*range(370, 400)), max_slice_regression=0.02)
    assert not decision.promoted
    assert decision.improvement.low > 0
    assert "part 'mood' is 66.7 % worse" in decision.reason
    assert "part 'topic'" not in decision.reason


def test_part_that_is_not_shown_to_be_as_good_counts_as_worse():
    """The value is as good as the champion's, but the interval is wide."""
    pair = accuracy_pair(*range(361, 400, 4))
    assert decide_parts(pair, max_slice_regression=0.5).promoted
    decision = decide_parts(pair, max_slice_regression=0.02)
    assert not decision.promoted
    assert "part 'mood' is 0.0 % better, with an interval from -" in decision.reason


def test_part_with_few_examples_is_not_shown_to_be_as_good():
    decision = decide_parts(accuracy_pair(), max_slice_regression=0.02, min_slice_examples=41)
    assert "part 'mood' has 40 test examples, too few to tell (41 needed)" in decision.reason


def test_summary_of_the_step_names_the_metric_of_the_gate():
    metrics = {name: Interval(value=value, low=0, high=9) for name, value in (("a", 1), ("b", 2))}
    evaluation = EvaluationRecord(
        task="shapes", weights_digest="mine", examples=9, metrics=metrics, scores="",
        baselines={"a": 3.0, "b": 4.0},
    )  # fmt: skip
    decision = GateRecord(
        subject=SUBJECT, promoted=False, reason="why", metric="b", greater_is_better=True,
        candidate=2.0, margin=0.0,
    )  # fmt: skip
    assert _summary(evaluation, decision) == "b 2, of the baseline 4; why"
    other = decision.model_copy(update={"metric": "c"})
    assert _summary(evaluation, other) == "a 1, of the baseline 3; why"

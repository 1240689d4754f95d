"""The gate's decisions, on tables of cases and on simulated paired scores."""

import numpy as np
import pytest

from steadytrain.components.evaluate.bootstrap import Resampling
from steadytrain.components.evaluate.gate import Gate
from steadytrain.components.shared.config import GateConfig
from steadytrain.components.shared.records import Subject

from support.means import DIRECTIONS, Means

SUBJECT = Subject(
    run_id="run", model_name="shapes", champion_alias="champion", weights_digest="mine", rules="r"
)
HOW = Resampling(samples=500, confidence=0.95, seed=0)


def gate(metric="bits_per_byte", **limits):
    return Gate(SUBJECT, GateConfig(**limits), metric, HOW, DIRECTIONS)


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
    return gate(metric, **limits).decide({metric: pair.value}, pair.pair)


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
    assert "% better (95 % interval" in decision.reason


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


def test_models_without_a_difference_are_rarely_promoted():
    promoted = sum(decide(language_pair(0.0, seed=seed)).promoted for seed in range(100))
    assert promoted <= 8


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
    units = np.repeat(np.arange(10), 100)
    random = np.random.default_rng(4)
    drift = random.normal(scale=0.05, size=10)[units]
    weights = np.ones(1000)
    champion = np.full(1000, 2.0)
    candidate = champion * (0.985 + drift - drift.mean())
    alone = Means("1", "theirs", candidate, champion, weights, np.arange(1000), {})
    grouped = Means("1", "theirs", candidate, champion, weights, units, {})
    assert decide(alone).promoted
    assert not decide(grouped).promoted


@pytest.mark.parametrize(("count", "promoted"), [(5, False), (6, True)])
def test_handful_of_examples_proves_nothing(count, promoted):
    decision = decide(language_pair(0.5, count=count, noise=0.0))
    assert decision.promoted is promoted
    assert ("too few to tell (6 needed)" in decision.reason) is not promoted


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
    made = Gate(SUBJECT, GateConfig(**limits), "accuracy", HOW, DIRECTIONS, parts)
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

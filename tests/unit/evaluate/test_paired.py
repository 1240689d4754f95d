"""The comparison of two models: against SciPy, and where there is no answer."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from steadytrain.components.evaluate.classes import Classes
from steadytrain.components.evaluate.metric import Scores
from steadytrain.components.evaluate.paired import paired_differences, read_scores, unpaired
from steadytrain.components.shared.errors import BadInput

from support.evaluating import language_table

HOW = {"confidence": 0.95, "min_units": 30}


def language(shift, count=200, **options):
    numbers = np.random.default_rng(1)
    hardness = numbers.normal(50, 20, count)
    own = np.random.default_rng(int(100 * abs(shift)) + 2).normal(0, 1, count)
    return Scores.of(
        language_table(hardness + own + shift, np.full(count, 20), np.full(count, 80), **options)
    )


def test_interval_agrees_with_scipys_paired_bootstrap():
    from scipy import stats

    first, second = language(0.0), language(-0.3)
    found = paired_differences(first, second, ["loss"], **HOW)["loss"]
    theirs = stats.bootstrap(
        (first.loss, second.loss),
        lambda one, other, axis: (other.mean(axis) - one.mean(axis)) / 20,
        paired=True,
        vectorized=True,
        n_resamples=4000,
        method="percentile",
        rng=np.random.default_rng(3),
    ).confidence_interval
    assert found.difference.value == pytest.approx((second.loss - first.loss).mean() / 20)
    assert found.difference.low == pytest.approx(theirs.low, abs=0.002)
    assert found.difference.high == pytest.approx(theirs.high, abs=0.002)
    # Unpaired, the same difference would drown in how much the examples differ.
    assert found.better == 1
    assert found.difference.high - found.difference.low < 0.1 * first.loss.std() / 20


def test_difference_that_can_be_chance_names_no_better_model():
    found = paired_differences(language(0.0), language(0.01), ["loss", "perplexity"], **HOW)
    assert {name: item.better for name, item in found.items()} == {"loss": None, "perplexity": None}


@pytest.mark.parametrize(("name", "greater"), [("accuracy", True), ("ece", False)])
def test_better_follows_the_direction_of_the_metric(name, greater):
    label = np.array([0, 1] * 60)
    right, wrong = classifier(label, label), classifier(label, np.where(label, label, 1))
    found = paired_differences(wrong, right, [name], **HOW)[name]
    assert found.greater_is_better == greater
    assert (found.difference.low > 0) == greater
    assert found.better == 1


def classifier(label, prediction):
    """Scores of a classifier that is 95 % sure of each prediction."""
    sure = np.where(np.eye(2)[prediction] == 1, 0.95, 0.05)
    return replace(language(0, len(label)), classes=Classes(label, prediction, sure))


@pytest.mark.parametrize(("count", "better"), [(1, None), (29, None), (30, 1)])
def test_few_examples_decide_nothing_however_large_the_difference(count, better):
    found = paired_differences(language(0, count), language(-20, count), ["loss"], **HOW)["loss"]
    assert math.isnan(found.difference.low) is (better is None)
    assert found.better == better


def test_examples_of_one_group_count_once():
    groups = [str(index // 7) for index in range(200)]
    first, second = language(0, group=groups), language(-20, group=groups)
    assert paired_differences(first, second, ["loss"], **HOW)["loss"].better is None


def test_infinite_loss_decides_nothing():
    first, second = language(0), language(-1)
    second = replace(second, loss=np.append(second.loss[1:], np.inf))
    assert paired_differences(first, second, ["loss"], **HOW)["loss"].better is None


def test_metric_of_other_spans_is_left_out():
    first, second = language(0), replace(language(-1), targets=np.full(200, 19.0))
    found = paired_differences(first, second, ["loss", "bits_per_byte", "unknown"], **HOW)
    assert set(found) == {"bits_per_byte"}


def test_other_examples_cannot_be_paired():
    first = language(0)
    assert not unpaired(first, language(-1))
    assert "different examples (200 and 100, of which" in unpaired(first, language(0, 100))
    grouped = language(0, group=["a"] * 200)
    assert "grouped differently" in unpaired(first, grouped)


@pytest.mark.parametrize("content", [b"", b"PAR1", None])
def test_damaged_scores_are_named(tmp_path, content):
    path = tmp_path / "scores.parquet"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadInput, match=r"scores\.parquet"):
        read_scores(path)


def test_table_without_scores_is_named(tmp_path):
    path = tmp_path / "scores.parquet"
    pq.write_table(language_table([1.0], [1], [1]).drop(["loss"]), path)
    with pytest.raises(BadInput, match=r"does not hold scores: .*loss"):
        read_scores(path)

"""The order of a mixture: exact shares, and rows that the place alone decides."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from steadytrain.components.shared.errors import BadInput
from steadytrain.components.techniques import order
from steadytrain.components.techniques.multi_task import MultiTaskConfig
from steadytrain.components.techniques.multi_task.weights import mixture_of, shares_of
from steadytrain.components.techniques.order import BLOCK, Mixture, largest_remainder

PARTS = np.random.default_rng(0).permutation(np.repeat([0, 1, 2], [50, 9, 30]))
SHARES = np.array([0.5, 0.3, 0.2])


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(order, "BLOCK", 100)


def test_each_block_has_the_exact_shares():
    taken = PARTS[Mixture(PARTS, SHARES, 1).take(0, 1000)]
    for block in taken.reshape(-1, 100):
        assert Counter(block.tolist()) == {0: 50, 1: 30, 2: 20}


def test_each_part_is_seen_whole_before_a_row_comes_again():
    taken = np.array(Mixture(PARTS, SHARES, 1).take(0, 5000))
    for part in range(3):
        mine, rows = taken[PARTS[taken] == part], np.flatnonzero(part == PARTS)
        epochs = mine[: len(mine) // len(rows) * len(rows)].reshape(-1, len(rows))
        assert len(epochs) > 10
        assert (np.sort(epochs, axis=1) == rows).all()
        assert len({tuple(epoch) for epoch in epochs.tolist()}) == len(epochs)


@given(position=st.integers(0, 900), count=st.integers(0, 150))
def test_a_new_order_finds_any_place(position, count):
    whole = Mixture(PARTS, SHARES, 1).take(0, 1050)
    assert Mixture(PARTS, SHARES, 1).take(position, count) == whole[position : position + count]


def test_seeds_draw_different_rows():
    first, second = (Mixture(PARTS, SHARES, seed).take(0, 50) for seed in (1, 2))
    assert first != second


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=9), st.integers(0, 500))
def test_largest_remainder_adds_up_and_is_within_one(weights, total):
    shares = np.array(weights) / sum(weights)
    counts = largest_remainder(shares, total)
    assert counts.sum() == total
    assert (np.abs(counts - shares * total) < 1).all()


def test_temperature_is_that_of_multilingual_bert():
    """S = 0.7 in its README: a share is p ** S, divided by the sum over all parts."""
    sizes = {"a": 9000, "b": 900, "c": 100}
    config = MultiTaskConfig(sampling="temperature", temperature=1 / 0.7)
    smoothed = [(size / 10_000) ** 0.7 for size in sizes.values()]
    expected = [share / sum(smoothed) for share in smoothed]
    assert shares_of(sizes, config) == pytest.approx(expected)


def test_weights_are_normalized():
    given = {"b": 1.0, "a": 3.0}
    config = MultiTaskConfig(sampling="weights", sampling_weights=given)
    assert shares_of({"a": 5, "b": 500}, config) == pytest.approx([0.75, 0.25])


def test_a_part_that_would_never_be_drawn_is_an_error(monkeypatch):
    monkeypatch.setattr(order, "BLOCK", BLOCK)
    weights = {"a": 1.0, "b": 1e-8}
    config = MultiTaskConfig(sampling="weights", sampling_weights=weights)
    labels = np.array([0, 1, 2, 3], dtype=np.int32)
    with pytest.raises(BadInput, match="the part 'b' has a share below 1 in 65536"):
        mixture_of(labels, ["a/x", "a/y", "b/x", "b/y"], config, 1)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"sampling": "weights", "sampling_weights": {"a": 1e9, "b": 1e-300}}, "sampling_weights"),
        ({"sampling": "temperature", "temperature": 1e308}, "temperature"),
    ],
)
def test_shares_that_draw_nothing_are_no_settings(settings, field):
    with pytest.raises(ValidationError) as caught:
        MultiTaskConfig(**settings)
    (problem,) = caught.value.errors()
    assert field in str((problem["loc"], problem["ctx"].get("field")))


def test_a_task_of_which_a_run_draws_no_row_is_named(monkeypatch):
    monkeypatch.setattr(order, "BLOCK", BLOCK)
    config = MultiTaskConfig(sampling="weights", sampling_weights={"a": 1e4, "b": 1.0})
    labels = np.array([0, 1, 2, 3], dtype=np.int32)
    of = mixture_of(labels, ["a/x", "a/y", "b/x", "b/y"], config, 1)
    (remark,) = of.undrawn(4)
    assert "'b'" in remark
    assert not of.undrawn(BLOCK)

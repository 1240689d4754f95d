"""Balanced sampling: equal shares of every class, from the step alone."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.errors import BadInput, ConfigError
from steadytrain.components.tasks.checks import check_task
from steadytrain.components.techniques.rare_classes.balanced_order import BalancedOrder
from steadytrain.components.train.loop.data import Rows
from steadytrain.components.train.loop.order import load_order, order_of

from support.training import CLASSES, class_rows, language_rows, write_data

LABELS = np.array([0] * 90 + [1] * 9 + [2] * 2)
LENGTHS = np.arange(len(LABELS), dtype=np.int32) % 17 + 1


def order(**changes):
    settings = {"rows": len(LABELS), "seed": 3, "values": LABELS} | changes
    return BalancedOrder(**settings)


@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_every_epoch_has_equal_shares_of_the_classes(lengths):
    rows = len(LABELS)
    drawn = order(lengths=lengths, batch=4)
    total = Counter()
    for epoch in range(5):
        counts = Counter(LABELS[drawn.take(epoch * rows, rows)].tolist())
        assert sum(counts.values()) == rows
        assert max(counts.values()) - min(counts.values()) <= 1
        total += counts
    assert max(total.values()) - min(total.values()) <= 1


def test_rows_of_a_class_come_equally_often():
    taken = Counter(order().take(0, 8 * len(LABELS)))
    for label in range(3):
        counts = [taken[row] for row in np.flatnonzero(label == LABELS).tolist()]
        assert max(counts) - min(counts) <= 1


def test_the_rows_of_a_step_do_not_depend_on_earlier_ones():
    first, second = order(lengths=LENGTHS, batch=4), order(lengths=LENGTHS, batch=4)
    whole = list(first.take(0, 400))
    assert list(second.take(250, 30)) == whole[250:280]
    assert list(second.take(4, 8)) == whole[4:12]
    assert list(order(seed=4).take(0, 400)) != whole


def configure(task, **training):
    return from_mapping(
        {
            "name": "tiny",
            "data": {"source": ["unused"], "task": task},
            "model": {"config": {"model_type": "bert"}},
            "training": {"order": "balanced", **training},
        }
    )


def test_rows_of_a_task_are_balanced_by_their_labels(tmp_path):
    rows = class_rows(20)
    data = write_data(
        tmp_path, rows, [], task="sequence_classification", schema=CLASSES, tokenizer=False
    )
    stored = Rows([data.path(name) for name in data.sides["train"].shards])
    training = configure("sequence_classification").training
    found = order_of(stored, None, training)
    assert set(found.take(0, 20)) <= set(range(20))
    labels = np.array([row["label"] for row in rows])
    expected = BalancedOrder(20, training.seed, None, 32, values=labels)
    assert list(found.take(7, 50)) == expected.take(7, 50)


def test_rows_without_labels_are_rejected(tmp_path):
    with pytest.raises(ConfigError, match="causal_lm has no labels to balance"):
        check_task(configure("causal_lm"))
    data = write_data(tmp_path, language_rows(4), [], tokenizer=False)
    stored = Rows([data.path(name) for name in data.sides["train"].shards])
    with pytest.raises(BadInput, match=r"reads the column 'label', and the rows have input_ids"):
        order_of(stored, None, configure("causal_lm").training)


def test_options_are_rejected():
    with pytest.raises(BadInput, match=r"cannot be created with training\.order_options"):
        load_order("balanced", {"share": 2})


def test_balancing_twice_is_rejected():
    with pytest.raises(ConfigError, match="both make up for rare classes"):
        configure("sequence_classification", class_weights={"kind": "balanced"})

"""Which rows make up a global batch: each once per epoch, determined by the position alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytrain.components.shared import plugins
from steadytrain.components.shared.config import TrainingConfig
from steadytrain.components.shared.errors import BadInput, ConfigError, DataError
from steadytrain.components.shared.events.types import TrainingStep
from steadytrain.components.techniques.order import GROUPED_BATCHES, RowOrder
from steadytrain.components.train.failures import PluginFailed
from steadytrain.components.train.loop.data import Rows
from steadytrain.components.train.loop.order import order_of

from support.plugins import write_plugin
from support.training import CLASSES, Bench, class_rows, events_of, write_data


@pytest.mark.parametrize("grouped", [False, True])
@given(rows=st.integers(1, 40), batch=st.integers(1, 17), seed=st.integers(0, 5))
def test_each_epoch_sees_every_row_once_and_no_tail_is_dropped(grouped, rows, batch, seed):
    lengths = np.arange(rows, dtype=np.int32) % 7 if grouped else None
    order = RowOrder(rows, seed, lengths, batch)
    steps = -(-3 * rows // batch)

    stream = [index for step in range(steps) for index in order.take(step * batch, batch)]

    for epoch in range(3):
        assert sorted(stream[epoch * rows : (epoch + 1) * rows]) == list(range(rows))


def test_order_depends_on_seed_epoch_and_position_alone():
    first, again, other = RowOrder(50, 1), RowOrder(50, 1), RowOrder(50, 2)
    again.take(170, 3)

    assert first.take(90, 30) == again.take(90, 30)
    assert first.take(0, 50) != first.take(50, 50)
    assert first.take(0, 50) != other.take(0, 50)


def test_empty_training_side_is_rejected():
    with pytest.raises(DataError, match="training side has no rows"):
        order_of(Rows([]), None, TrainingConfig())


WRONG = """
class Plugin:
    def __init__(self, rows, seed, lengths, batch):
        self.rows = rows

    def take(self, position, count):
        return {}
"""


@pytest.fixture
def take(tmp_path, monkeypatch):
    """Install an order whose take() runs a statement, and take the rows 4 to 7 of 40."""

    def take_with(name, statement):
        text = WRONG.replace("return {}", statement)
        monkeypatch.syspath_prepend(write_plugin(tmp_path / "site", plugins.ORDERS, name, text))
        return order_of(range(40), None, TrainingConfig(order=name)).take(4, 4)

    return take_with


@pytest.mark.parametrize(
    ("name", "returned", "message"),
    [
        ("a_word", "'late'", r"the str 'l'"),
        ("a_share", "[0.5] * count", r"the float 0.5"),
        ("none", "None", r"None"),
        ("nested", "[[0]] * count", r"the list \[0\]"),
        ("too_few", "[0] * (count - 1)", "3 rows"),
        ("too_far", "[self.rows] * count", "rows 40 to 40"),
        ("negative", "[-1] + [0] * (count - 1)", "rows -1 to 0"),
    ],
)
def test_order_that_returns_wrong_rows_is_reported(take, name, returned, message):
    with pytest.raises(
        BadInput, match=rf"training.order = '{name}': .* returned {message}"
    ) as caught:
        take(name, f"return {returned}")
    assert "return 4 indices from 0 to 39" in caught.value.remedy


def test_rows_may_be_numpy_integers(take):
    statement = "import numpy; return numpy.arange(position, position + count)"
    assert take("numpy_rows", statement) == [4, 5, 6, 7]


@pytest.mark.parametrize("statement", ["raise SystemExit(0)", "return 1 / 0"])
def test_order_that_fails_is_named(take, statement):
    name = f"fails_{len(statement)}"
    with pytest.raises(PluginFailed, match=rf"training.order = '{name}' failed in take\(\)"):
        take(name, statement)


@pytest.mark.parametrize(
    ("name", "text", "error", "message"),
    [
        ("leaves", "import sys\nPlugin = lambda *_: sys.exit(0)", PluginFailed, "SystemExit: 0"),
        ("five", "Plugin = lambda *_: 5", BadInput, r"creates 5, which has no take"),
    ],
)
def test_order_that_cannot_be_created_is_named(tmp_path, monkeypatch, name, text, error, message):
    monkeypatch.syspath_prepend(write_plugin(tmp_path, plugins.ORDERS, name, text))
    with pytest.raises(error, match=f"training.order = '{name}' .*{message}"):
        order_of(range(40), None, TrainingConfig(order=name))


STRIDED = """
class Plugin:
    def __init__(self, rows, seed, lengths, batch, *, stride=1):
        self.rows, self.stride = rows, stride

    def take(self, position, count):
        return [at * self.stride % self.rows for at in range(position, position + count)]
"""


def test_order_gets_its_options(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(write_plugin(tmp_path, plugins.ORDERS, "strided", STRIDED))
    options = {"order": "strided", "order_options": {"stride": 3}}
    assert order_of(range(40), None, TrainingConfig(**options)).take(0, 4) == [0, 3, 6, 9]
    options["order_options"] = {"step": 3}
    with pytest.raises(BadInput, match="unexpected keyword argument 'step'") as caught:
        order_of(range(40), None, TrainingConfig(**options))
    assert "stride=1" in caught.value.remedy
    with pytest.raises(ValueError, match="seeded has no options"):
        TrainingConfig(order_options={"stride": 3})


def test_unknown_order_is_rejected_with_the_known_ones(make_bench):
    with pytest.raises(ConfigError, match="no installed package has shuffled") as caught:
        make_bench(training={"order": "shuffled"})
    assert "use one of balanced, seeded" in str(caught.value)


def padding(order, lengths, batch, batches):
    """Return the share of padding if each global batch is padded to its longest row."""
    stream = [lengths[order.take(step * batch, batch)] for step in range(batches)]
    return 1 - sum(map(np.sum, stream)) / sum(len(part) * part.max() for part in stream)


def test_rows_of_a_global_batch_have_similar_lengths():
    lengths = np.random.default_rng(0).geometric(1 / 60, 4003).astype(np.int32)
    grouped, plain = RowOrder(4003, 1, lengths, 16), RowOrder(4003, 1)

    # Three epochs. The second and the third start in the middle of a batch.
    assert padding(plain, lengths, 16, 750) > 0.6
    assert padding(grouped, lengths, 16, 750) < 0.1


def test_grouping_keeps_pools_and_shuffles_batches():
    rows, batch = 2 * GROUPED_BATCHES * 8, 8
    lengths = np.random.default_rng(0).integers(1, 500, rows).astype(np.int32)
    grouped, plain = RowOrder(rows, 1, lengths, batch), RowOrder(rows, 1)

    assert sorted(grouped.take(0, rows)) == sorted(plain.take(0, rows))
    longest = [lengths[grouped.take(step * batch, batch)].max() for step in range(rows // batch)]
    assert abs(np.corrcoef(longest, np.arange(len(longest)))[0, 1]) < 0.3


def test_grouped_order_depends_only_on_the_position():
    lengths = np.random.default_rng(0).integers(1, 90, 50).astype(np.int32)
    first, again = (RowOrder(50, 1, lengths, 4) for _ in range(2))
    again.take(170, 3)

    assert first.take(90, 30) == again.take(90, 30)


def test_training_run_reports_how_much_is_padding(tmp_path):
    rows = class_rows(40, classes=2)
    for index, row in enumerate(rows):
        row["input_ids"] *= 1 + index % 4
    data = write_data(
        tmp_path / "data",
        rows,
        rows[:4],
        task="sequence_classification",
        schema=CLASSES,
        labels=["no", "yes"],
    )
    size, micro = 8, 4
    steps = {"global_batch_size": size, "micro_batch_size": micro, "max_steps": 6}
    bench = Bench.make(tmp_path / "run", data, training={**steps, "logging_steps": 1})

    parts = bench.train_here().parts

    lengths = parts.train.lengths("input_ids")
    told = [event.padding for event in events_of(bench.workspace, TrainingStep)]
    assert len(told) == 6
    for step, share in enumerate(told):
        taken = lengths[parts.order.take(step * size, size)]
        cuts = [taken[at : at + micro] for at in range(0, size, micro)]
        assert share == pytest.approx(1 - taken.sum() / sum(len(cut) * cut.max() for cut in cuts))
    assert 0 < max(told) < 0.5

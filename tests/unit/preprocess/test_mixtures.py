"""Mixtures of data sets: prepared apart, drawn by the shares that are set, and counted."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from steadytrain.components.pages.data_section import DataCard, data_section
from steadytrain.components.preprocess.step import run
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.config.training import TrainingConfig
from steadytrain.components.shared.effects import Use
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.records import SideRecord, SourceRecord
from steadytrain.components.sizing.length import length_of, mixture_of, of_mixture, steps_of
from steadytrain.components.techniques import order
from steadytrain.components.techniques.mixture import MixtureConfig
from steadytrain.components.train.loop.data import share

from support.data import quarantined, read_table, sentence, side_rows, write_jsonl
from support.training import LLAMA

SHARED = 30


@pytest.fixture
def configure(tmp_path):
    """Return what configures a run on two data sets, which share their first texts."""
    short = [{"text": sentence(n, words=12)} for n in range(400)]
    long = [{"body": sentence(n, words=12 if n < SHARED else 55)} for n in range(SHARED)]
    long += [{"body": sentence(n + 5000, words=55)} for n in range(120)]
    write_jsonl(tmp_path / "short.jsonl", short)
    write_jsonl(tmp_path / "long.jsonl", long)

    def configured(mixture=None, **training):
        return from_mapping(
            {
                "name": "mixed",
                "output": str(tmp_path / "output"),
                "data": {
                    "parts": {
                        "short": {"source": [str(tmp_path / "short.jsonl")]},
                        "long": {
                            "source": [str(tmp_path / "long.jsonl")],
                            "columns": {"text": "body"},
                        },
                    },
                    "sequence_length": 64,
                    "validation_share": 0.1,
                    "test_share": 0.1,
                    "near_duplicate_threshold": None,
                },
                "model": {"config": LLAMA, "vocab_size": 400},
                "training": {"mixture": mixture or {}, "global_batch_size": 8, **training},
            }
        )

    return configured


def sides_of(record):
    return {name: side.sources for name, side in record.sides.items()}


def test_rows_of_a_data_set_have_only_its_documents_and_are_counted(configure):
    record = run(configure())
    for name, side in record.sides.items():
        index = read_table(record.path(side.index)).to_pylist()
        assert [one.name for one in side.sources] == ["long", "short"]
        assert sum(one.rows for one in side.sources) == side.rows == len(index)
        assert sum(one.tokens for one in side.sources) == side.tokens
        assert sum(one.documents for one in side.sources) == side.documents
        start, owners = 0, {}
        for one in side.sources:
            own = index[start : start + one.rows]
            start += one.rows
            assert sum(row["tokens"] for row in own) == one.tokens
            documents = {document for row in own for document in row["documents"]}
            assert len(documents) == one.documents
            owners[one.name] = documents
        assert not owners["long"] & owners["short"], name
    slices = read_table(record.path(record.test_records))["slice"].to_pylist()
    assert Counter(slices) == {one.name: one.documents for one in record.sides["test"].sources}


def test_text_of_several_data_sets_is_learned_from_one_and_crosses_no_split(configure):
    record = run(configure())
    duplicates = [entry for entry in quarantined(record) if entry["reason"] == "exact_duplicate"]
    assert len(duplicates) == SHARED
    ids = {
        name: {
            document
            for row in read_table(record.path(side.index)).to_pylist()
            for document in row["documents"]
        }
        for name, side in record.sides.items()
    }
    assert not ids["train"] & ids["test"]
    assert sum(map(len, ids.values())) == 400 + 120


def test_same_data_are_reused_for_another_mixture_but_not_for_other_parts(configure):
    first, second = configure(), configure({"by": "weight", "weights": {"short": 1, "long": 9}})
    assert run(first).fingerprint == run(second).fingerprint
    assert first.counted(Use.DATA) == second.counted(Use.DATA)
    assert first.counted(Use.RESUME) != second.counted(Use.RESUME)
    names = first.data.model_copy(
        update={"parts": {"other": first.data.parts["short"], "long": first.data.parts["long"]}}
    )
    changed = first.model_copy(update={"data": names})
    assert changed.counted(Use.DATA) != first.counted(Use.DATA)


MIXTURES = {
    "size": {},
    "weight": {"by": "weight", "weights": {"short": 3, "long": 1}},
    "temperature": {"by": "temperature", "temperature": 5},
    "tokens": {"by": "tokens", "tokens": {"short": 30_000, "long": 50_000}},
}


@pytest.mark.parametrize("kind", MIXTURES)
def test_realized_shares_are_those_planned_by_an_independent_count(configure, kind):
    config = configure(MIXTURES[kind])
    record = run(config)
    side = record.sides["train"]
    tokens = {one.name: one.tokens for one in side.sources}
    expected = {
        "size": tokens,
        "weight": {"short": 3, "long": 1},
        "temperature": {name: size**0.2 for name, size in tokens.items()},
        "tokens": {"short": 30_000, "long": 50_000},
    }[kind]
    total = sum(expected.values())
    mixture = mixture_of(config.training, side)
    taken = mixture.order(config.training.seed).take(0, 20_000)
    # Counted from the rows themselves, by their documents and tokens.
    rows = [len(row["input_ids"]) for row in side_rows(record, "train")]
    first = side.sources[0].rows
    learned = Counter()
    for row in taken:
        learned["long" if row < first else "short"] += rows[row]
    everything = sum(learned.values())
    for drawn in mixture.drawn(20_000):
        assert drawn.planned == pytest.approx(expected[drawn.name] / total)
        assert learned[drawn.name] / everything == pytest.approx(drawn.planned, abs=2e-3)
        assert drawn.realized == pytest.approx(learned[drawn.name] / everything, abs=2e-3)
        mine = sum((row < first) == (drawn.name == "long") for row in taken)
        assert drawn.rows == mine
        own = next(one for one in side.sources if one.name == drawn.name)
        assert drawn.passes == pytest.approx(mine / own.rows)


def test_budget_of_tokens_is_an_epoch(configure):
    config = configure(MIXTURES["tokens"], num_train_epochs=1)
    record = run(config)
    steps = steps_of(config.training, record.sides["train"])
    mixture = mixture_of(config.training, record.sides["train"])
    learned = {one.name: one.tokens for one in mixture.drawn(steps * 8)}
    for name, budget in MIXTURES["tokens"]["tokens"].items():
        assert learned[name] == pytest.approx(budget, rel=0.02)
    assert length_of(config, 8).tokens == pytest.approx(80_000, rel=0.01)


def side(**rows):
    """A training side whose rows have 10 tokens each."""
    sources = [
        SourceRecord(name=name, rows=count, documents=count, tokens=10 * count)
        for name, count in sorted(rows.items())
    ]
    total = sum(rows.values())
    return SideRecord(shards=[], rows=total, documents=total, tokens=10 * total, sources=sources)


def training(mixture, **more):
    return TrainingConfig(mixture=MixtureConfig(**mixture), **more)


@pytest.mark.parametrize("weights", [{"a": 1, "b": 1}, {"a": 9, "b": 1}, {"a": 1, "b": 99}])
def test_training_stops_before_the_first_row_comes_again(weights):
    recipe = training(
        {"by": "weight", "weights": weights, "exhausted": "stop"},
        max_steps=10**6,
        global_batch_size=1,
    )
    of = side(a=700, b=90)
    steps = steps_of(recipe, of)
    first = mixture_of(recipe, of).order(1)
    taken = first.take(0, steps + 1)
    assert len(set(taken[:steps])) == steps
    assert taken[steps] in taken[:steps]
    (remark,) = of_mixture(recipe, of, steps)
    used_up = "a" if taken[steps] < 700 else "b"
    assert f"the part {used_up!r} is used up after {steps:,} rows" in remark


def test_repeated_data_set_is_named_with_its_passes():
    recipe = training(
        {"by": "weight", "weights": {"a": 1, "b": 1}}, max_steps=100, global_batch_size=4
    )
    of = side(a=700, b=90)
    assert steps_of(recipe, of) == 100
    (remark,) = of_mixture(recipe, of, 100)
    assert "'b' has 90 rows" in remark
    assert "2.22 passes in 400 rows" in remark


def test_data_set_smaller_than_a_step_is_refused_with_the_fix():
    recipe = training(
        {"by": "weight", "weights": {"a": 1, "b": 9}, "exhausted": "stop"}, global_batch_size=64
    )
    with pytest.raises(BadInput, match=r"'b' is used up after .* rows, and a step takes 64"):
        steps_of(recipe, side(a=700, b=9))


def test_share_that_would_never_be_drawn_is_refused():
    recipe = training({"by": "weight", "weights": {"a": 1e7, "b": 1}})
    with pytest.raises(BadInput, match="'b' has a share below 1 in 65536"):
        mixture_of(recipe, side(a=7, b=9))


def test_a_part_of_which_a_run_draws_no_row_is_named():
    recipe = training({"by": "weight", "weights": {"a": 1e4, "b": 1}})
    of = mixture_of(recipe, side(a=7, b=9)).order(1)
    first = next(place for place, row in enumerate(of.take(0, order.BLOCK)) if row >= 7)
    (remark,) = of.undrawn(first)
    assert "'b'" in remark
    assert not of.undrawn(first + 1)


def test_each_global_batch_has_nearly_the_planned_shares_on_any_number_of_ranks(monkeypatch):
    monkeypatch.setattr(order, "BLOCK", 1000)
    recipe = training({"by": "weight", "weights": {"a": 5, "b": 3, "c": 2}})
    of = side(a=37, b=100, c=11)
    first = mixture_of(recipe, of).order(3)
    whole = first.take(0, 5000)
    for step in range(50):
        batch = mixture_of(recipe, of).order(3).take(step * 100, 100)
        assert batch == whole[step * 100 : step * 100 + 100]
        assert [*share(batch, 0, 2), *share(batch, 1, 2)] == batch
        counts = np.bincount(np.searchsorted([37, 137, 148], batch, side="right"), minlength=3)
        assert np.abs(counts - [50, 30, 20]).max() <= 1
    assert np.bincount(np.searchsorted([37, 137, 148], whole, side="right")).tolist() == [
        *(2500, 1500, 1000)
    ]


def test_card_and_report_show_each_data_set(configure):
    config = configure(MIXTURES["weight"])
    record = run(config)
    card = DataCard.model_validate(json.loads(record.path("card.json").read_text()))
    section = data_section(record, card)
    assert [name for name, _ in section["mixture"]] == ["long", "short"]
    assert len(section["mixture_columns"]) == 4
    mixture = mixture_of(config.training, record.sides["train"])
    section = data_section(record, card, drawn=mixture.drawn(400))
    columns = section["mixture_columns"]
    cells = {name: dict(zip(columns, row, strict=True)) for name, row in section["mixture"]}
    assert cells["short"]["Planned share"] == "75.0%"
    assert cells["short"]["Realized share"].startswith(("74.", "75."))
    assert "Mixture of data sets" in record.path("card.html").read_text()


@pytest.mark.parametrize(
    ("mixture", "field"),
    [
        ({"by": "weight"}, "training.mixture.weights"),
        ({"by": "weight", "weights": {"short": 1}}, "training.mixture.weights"),
        ({"weights": {"short": 1, "long": 1}}, "training.mixture.weights"),
        ({"by": "tokens", "tokens": {"short": 1, "x": 1}}, "training.mixture.tokens"),
        ({"by": "size", "temperature": 3}, "training.mixture.temperature"),
        ({"by": "temperature", "temperature": 1e308}, "training.mixture.temperature"),
        ({"by": "weight", "weights": {"short": 1e-300, "long": 1}}, "mixture.weights"),
        ({"by": "tokens", "tokens": {"short": 1, "long": 10**12}}, "mixture.tokens"),
    ],
)
def test_shares_that_nothing_reads_are_refused(configure, mixture, field):
    with pytest.raises(BadInput, match=field):
        configure(mixture)


def test_mixture_without_parts_is_refused(tmp_path):
    with pytest.raises(BadInput, match=r"training\.mixture.*data\.parts are not set"):
        from_mapping(
            {
                "name": "one",
                "data": {"source": [str(tmp_path)]},
                "model": {"config": LLAMA},
                "training": {"mixture": {"by": "temperature"}},
            }
        )

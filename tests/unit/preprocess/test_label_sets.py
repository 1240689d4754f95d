"""Records with any number of labels: what is read, counted, refused, and put on which side."""

from __future__ import annotations

import csv
import itertools
import json
import re
from collections import Counter

import datasets
import numpy as np
import pytest

from steadytrain.components.preprocess.reading import MAX_LABELS, check_labels
from steadytrain.components.preprocess.split import SIDES, TRAIN, stratify
from steadytrain.components.preprocess.step import run
from steadytrain.components.shared.errors import BadInput, ConfigError, DataError
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import Warned
from steadytrain.components.shared.quantities import percent
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.tasks.encoding.fields import NO_CLASS_REMEDY, Defect, labels_of
from steadytrain.pipelines.sources import find_task, for_task

from support.data import read_table, sentence, side_rows, write_jsonl

TASK = "multi_label_classification"
NAMES = ["rare", "often", "half"]


def labels_of_row(n):
    """Return the labels of a row: half of all rows have one, a third two, and some have none."""
    return [name for name, every in zip(NAMES, (20, 3, 2), strict=True) if n % every == 0]


def rows_of(count=200):
    return [{"text": sentence(n), "label": labels_of_row(n)} for n in range(count)]


def warned(config):
    events = read_events(Workspace.of(config).events)
    return [one.message for one in events if isinstance(one, Warned)]


def test_every_label_is_learned_counted_and_tested(tmp_path, configure):
    rows = rows_of()
    rows[3]["label"] = ["often", "often"]
    config = configure(write_jsonl(tmp_path / "rows.jsonl", rows), task=TASK)
    record = run(config)
    assert record.labels == ["half", "often", "rare"]
    truth = {row["text"]: sorted({*row["label"]}) for row in rows}
    tested = read_table(record.path(record.test_records)).to_pylist()
    assert all(row["label"] == truth[row["text"]] for row in tested)
    card = json.loads(record.path("card.json").read_text(encoding="utf-8"))
    for side in SIDES:
        stored = [row["label"] for row in side_rows(record, side)]
        assert all(found == sorted(found) for found in stored)
        named = Counter(record.labels[index] for found in stored for index in found)
        assert card["sides"][side]["labels"] == dict(named)
        sizes = Counter(map(len, stored))
        assert card["sides"][side]["label_counts"] == {str(n): sizes[n] for n in sorted(sizes)}
        assert record.sides[side].target_tokens == len(stored)
    learned = Counter(
        tuple(found)
        for side in SIDES
        for found in (
            tuple(record.labels[index] for index in row["label"]) for row in side_rows(record, side)
        )
    )
    assert learned == Counter(map(tuple, truth.values()))
    said = "1 record name a label twice, which counts once"
    assert said in warned(config)
    assert said in card["warnings"]
    page = record.path("card.html").read_text(encoding="utf-8")
    # A label's share is that of the records that have it.
    ((label, records),) = Counter(itertools.chain(*truth.values())).most_common(1)
    assert re.search(rf">{label}</th>.*?>{percent(records / len(truth))}</td>", page, re.DOTALL)
    assert f"{card['sides']['train']['label_counts']['0']} records with no labels" in page


@pytest.mark.parametrize(
    ("value", "separator", "found"),
    [
        (["b", "a", "b"], None, ["b", "a", "b"]),
        ([10, 2], None, ["10", "2"]),
        ([], None, []),
        ([0, 1], None, ["0", "1"]),
        ("a,b", None, ["a,b"]),
        (7, None, ["7"]),
        ("a, b", ",", ["a", "b"]),
        (" ", ",", []),
        ("a|b", "|", ["a", "b"]),
        (None, None, "missing_field"),
        ([None], None, "missing_field"),
        ([""], None, "empty_field"),
        ("", None, "empty_field"),
        ("a,", ",", "empty_field"),
        (["a"], ",", "wrong_type"),
        ([["a"]], None, "not_a_class"),
        ([{"a": 1}], None, "wrong_type"),
        ([1.0, 0.0], None, "not_a_class"),
        ([True, False], None, "not_a_class"),
        ([0, 1, 0, 0], None, "not_a_class"),
        ("['a', 'b']", None, "not_a_class"),
        (0.5, None, "not_a_class"),
    ],
)
def test_what_is_a_list_of_labels(value, separator, found):
    row = {"label": value}
    if isinstance(found, list):
        assert labels_of(row, "label", separator=separator) == found
    else:
        with pytest.raises(Defect) as defect:
            labels_of(row, "label", separator=separator)
        assert defect.value.reason == found


def test_labels_in_text_need_a_separator(tmp_path, configure):
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as handle:
        writer = csv.writer(handle)
        writer.writerow(["text", "label"])
        writer.writerows((row["text"], "; ".join(row["label"])) for row in rows_of())
    config = configure(path, task=TASK, label_separator=";")
    record = run(config)
    assert record.labels == ["half", "often", "rare"]
    assert not json.loads(record.path("card.json").read_text(encoding="utf-8"))["defective"]
    assert find_task(str(path), ["data.label_separator=;"])[0] == TASK
    # Without it, a text is one label, and an empty one a defect.
    with pytest.raises(DataError, match="empty_field"):
        run(configure(path, task=TASK))
    with pytest.raises(ConfigError, match="sequence_classification has no lists of labels"):
        configure(path, task="sequence_classification", label_separator=";")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parquet", "disk"])
def test_names_of_hugging_face_classes_survive_in_lists(tmp_path, configure, kind):
    features = datasets.Features(
        {
            "text": datasets.Value("string"),
            "label": datasets.List(datasets.ClassLabel(names=NAMES)),
        }
    )
    indices = [[NAMES.index(name) for name in row["label"]] for row in rows_of()]
    indices[0] = None
    columns = {"text": [row["text"] for row in rows_of()], "label": indices}
    found = datasets.Dataset.from_dict(columns, features=features)
    source = tmp_path / ("rows.parquet" if kind == "parquet" else "set")
    found.to_parquet(source) if kind == "parquet" else found.save_to_disk(source)
    record = run(configure(source, task=TASK))
    assert record.labels == sorted(NAMES)
    tested = read_table(record.path(record.test_records)).to_pylist()
    truth = {row["text"]: sorted(row["label"]) for row in rows_of()}
    assert tested
    assert all(row["label"] == truth[row["text"]] for row in tested)
    card = json.loads(record.path("card.json").read_text(encoding="utf-8"))
    assert card["quarantine"] == {"missing_field": 1}


def test_each_side_has_its_share_of_each_label():
    """A label with a tenth of a thousand records, or a hundredth of them, is on each side."""
    shares = {SIDES.index("test"): 0.1, SIDES.index("validation"): 0.1}
    rates = [0.5, 0.3, 0.1, 0.03, 0.01]
    for seed in range(20):
        rng = np.random.default_rng(seed)
        places = rng.integers(0, 2**64, 1000, np.uint64)
        has = rng.random((1000, len(rates))) < rates
        records, labels = np.nonzero(np.column_stack([~has.any(1), has]))
        sides, _ = stratify(places[records], labels.astype(np.uint64), shares, sets=True)
        assert len({*zip(records.tolist(), sides.tolist(), strict=True)}) == 1000
        for label in range(len(rates) + 1):
            counts = np.bincount(sides[labels == label], minlength=3)
            total = counts.sum()
            for side, share in shares.items():
                # The exact share of each stratum is within one or a tenth, and there are six.
                assert abs(counts[side] - share * total) <= len(rates) + 1 + 0.1 * share * total
                assert counts[side] > 0 or total < 8
            assert counts[TRAIN] > 0


def test_rare_labels_stay_in_training_and_are_named(tmp_path, configure):
    rows = rows_of()
    rows[0]["label"].append("once")
    rows[1]["label"].append("twice")
    rows[2]["label"].append("twice")
    config = configure(write_jsonl(tmp_path / "rows.jsonl", rows), task=TASK)
    record = run(config)
    card = json.loads(record.path("card.json").read_text(encoding="utf-8"))
    assert [card["sides"][side]["lacks"] for side in ("train", "validation", "test")] == [
        [],
        ["once", "twice"],
        ["once", "twice"],
    ]
    assert (
        "2 classes have too few records for 3 sides, so all of them are in training: once, twice"
    ) in warned(config)


def test_records_that_all_resemble_others_are_an_error_about_the_records(tmp_path, configure):
    rows = [{"text": sentence(n % 3), "label": NAMES[: n % 4]} for n in range(60)]
    config = configure(write_jsonl(tmp_path / "rows.jsonl", rows), task=TASK)
    with pytest.raises(DataError, match="60 conflicting_label"):
        run(config)


def test_a_look_at_lists_of_labels_finds_the_task(tmp_path, configure):
    path = write_jsonl(tmp_path / "rows.jsonl", rows_of())
    task, reason = find_task(str(path), [])
    assert task == TASK
    assert "with 3 different labels" in reason
    assert for_task(str(path), task, reason, []).config.data.task == TASK
    with pytest.raises(BadInput, match=r"the first: label is \['rare', 'often', 'half'\]") as said:
        find_task(str(path), ["data.task=sequence_classification"])
    assert NO_CLASS_REMEDY in said.value.remedy
    assert TASK in NO_CLASS_REMEDY
    plain = write_jsonl(
        tmp_path / "plain.jsonl", [{**row, "label": "ab"[n % 2]} for n, row in enumerate(rows_of())]
    )
    assert find_task(str(plain), [])[0] == "sequence_classification"


def test_too_many_labels_are_refused(configure):
    check_labels(range(MAX_LABELS), configure("x").data)
    with pytest.raises(DataError, match="more than 100000 different labels"):
        check_labels(range(MAX_LABELS + 1), configure("x").data)


def test_a_column_for_each_label_is_named(tmp_path):
    rows = [{"text": sentence(n), "rude": n % 2, "spam": n % 3 == 0} for n in range(60)]
    task, reason = find_task(str(write_jsonl(tmp_path / "rows.jsonl", rows)), [])
    assert task == "causal_lm"
    assert "rude, spam hold only 0 and 1: if they are labels, write the names of" in reason
    assert TASK in reason
    rows = [{**row, "words": row["text"]} for row in rows]
    for row in rows:
        del row["text"]
    with pytest.raises(BadInput, match="rude, spam hold only 0 and 1"):
        find_task(str(write_jsonl(tmp_path / "other.jsonl", rows)), [])

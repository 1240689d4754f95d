"""Classes keep the names and the order that people expect of them."""

from __future__ import annotations

import csv
import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from steadytrain.components.preprocess.inputs import read_dataset
from steadytrain.components.preprocess.inspection import inspect, task_of
from steadytrain.components.preprocess.step import run
from steadytrain.components.preprocess.tables import COLUMNAR
from steadytrain.components.shared.class_names import in_order, indices_of, listed
from steadytrain.components.shared.errors import BadInput, DataError
from steadytrain.components.tasks.encoding.fields import NO_CLASS_REMEDY, class_of
from steadytrain.pipelines.sources import find_task

from support.data import quarantined, read_table, sentence, write_jsonl
from support.weight_digests import BERT

NAMES = ["World", "Sports", "Business", "Sci/Tech"]
MODEL = {"config": BERT, "vocab_size": 300}


def labeled(configure, source, **data):
    return configure(source, task="sequence_classification", model=MODEL, **data)


def test_whole_numbers_are_in_the_order_of_numbers(tmp_path, configure):
    """As text, the order is 0, 1, 10, 2, and that of a model trained elsewhere is another."""
    rows = [{"text": sentence(n), "label": n % 11} for n in range(330)]
    record = run(labeled(configure, write_jsonl(tmp_path / "rows.jsonl", rows)))
    assert record.labels == [str(n) for n in range(11)]


def test_whole_numbers_of_a_part_are_in_the_order_of_numbers(tmp_path, configure):
    rows = [{"text": sentence(n), "label": (n % 11) - 1} for n in range(330)]
    words = [{"text": sentence(n), "label": f"c{n % 11}"} for n in range(330, 660)]
    parts = {
        "stars": {"source": [str(write_jsonl(tmp_path / "stars.jsonl", rows))]},
        "words": {"source": [str(write_jsonl(tmp_path / "words.jsonl", words))]},
    }
    config = labeled(configure, "unused")
    data = config.data.model_dump() | {"task": "multi_task", "parts": parts}
    del data["source"]
    gate = config.gate.model_copy(update={"max_slice_regression": 0.02})
    config = type(config).model_validate(config.model_dump() | {"data": data, "gate": gate})
    words = ["c0", "c1", "c10", *(f"c{n}" for n in range(2, 10))]
    expected = [*(f"stars/{n}" for n in range(-1, 10)), *(f"words/{name}" for name in words)]
    assert run(config).labels == expected


@pytest.fixture
def classes(tmp_path):
    """A data set whose labels are indices of named classes; every 20th has none."""
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=NAMES)}
    )
    indices = [-1 if n % 20 == 0 else n % 4 for n in range(200)]
    columns = {"text": [sentence(n) for n in range(200)], "label": indices}
    return datasets.Dataset.from_dict(columns, features=features)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_names_of_hugging_face_classes_survive(tmp_path, configure, classes, kind):
    if kind == "parquet":
        source = tmp_path / "train.parquet"
        classes.to_parquet(source)
    else:
        classes.save_to_disk(tmp_path / "set")
        source = next((tmp_path / "set").glob("*.arrow"))
    config = labeled(configure, source, max_bad_share=0.06)
    record = run(config)
    assert record.labels == sorted(NAMES)
    reasons = [entry["reason"] for entry in quarantined(record)]
    assert reasons == ["missing_field"] * 10
    truth = {sentence(n): NAMES[n % 4] for n in range(200)}
    tested = read_table(record.path(record.test_records)).to_pylist()
    assert tested
    assert all(truth[row["text"]] == row["label"] for row in tested)
    found = inspect(config.data)
    assert set(found.labels) == set(NAMES)
    assert task_of(found, config.data)[0] == "sequence_classification"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["disk", "hub"])
def test_the_datasets_library_gives_the_same_names(tmp_path, classes, kind):
    folder = tmp_path / "set"
    if kind == "disk":
        classes.save_to_disk(folder)
    else:
        folder.mkdir()
        classes.to_parquet(folder / "train.parquet")
    address = str(folder) if kind == "disk" else f"hub:{folder}"
    rows = [row for chunk in read_dataset(address) for _, _, row in chunk.rows()]
    expected = [None if n % 20 == 0 else NAMES[n % 4] for n in range(200)]
    assert [row["label"] for row in rows] == expected


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ([0.5, 3.7, 2.0], "rows.csv"),
        ([0.5, 3.7, 2.0], "rows.jsonl"),
        ([[0, 2], [1], [0, 1]], "rows.jsonl"),
        ([["a"], ["a", "b"], []], "rows.csv"),
        (['["a"]', '["a", "b"]', "[]"], "rows.csv"),
    ],
)
@pytest.mark.parametrize("task", [None, "sequence_classification"])
def test_measured_values_and_several_classes_are_refused(tmp_path, configure, values, name, task):
    rows = [{"body": sentence(n), "topic": values[n % 3]} for n in range(60)]
    path = tmp_path / name
    if name.endswith("csv"):
        with path.open("w", newline="") as handle:
            writer = csv.DictWriter(handle, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    else:
        write_jsonl(path, rows)
    columns = {"text": "body", "label": "topic"}
    asked = [f"data.columns.{field}={column}" for field, column in columns.items()]
    first = repr(values[0] if name.endswith("jsonl") else str(values[0]))
    asked += [f"data.task={task}"] if task else []
    if task is None and values[0] in (0.5, [0, 2]):
        expected = "sequence_regression" if values[0] == 0.5 else "multi_label_classification"
        assert find_task(str(path), asked)[0] == expected
    else:
        with pytest.raises(BadInput) as caught:
            find_task(str(path), asked)
        assert f"the first: topic is {first}, not one class" in caught.value.message
        assert "one class, as text or a whole number" in caught.value.remedy
    with pytest.raises(DataError, match="not_a_class") as failed:
        run(labeled(configure, path, columns=columns))
    assert f"topic is {first}, not one class" in failed.value.message
    assert NO_CLASS_REMEDY in failed.value.remedy


@pytest.mark.slow
def test_classes_that_look_like_values_are_kept_if_listed(tmp_path, configure):
    """Names such as 3.10 are classes if data.labels says so; 1.0 and [NEG] are in any case."""
    versions = ["3.10", "3.11"]
    rows = [{"text": sentence(n), "label": versions[n % 2]} for n in range(60)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    assert run(labeled(configure, path, labels=versions)).labels == versions
    for label in ("1.0", "2.", "1e3", "[NEG]", "[", "v1.5", "nan"):
        assert class_of({"label": label}, "label") == label


def write_parquet(path, label, feature):
    table = pa.table({"text": [sentence(n) for n in range(60)], "label": label})
    metadata = {"info": {"features": {"label": feature}}}
    named = table.replace_schema_metadata({"huggingface": json.dumps(metadata)})
    pq.write_table(named, path)
    return path


@pytest.mark.slow
def test_a_class_without_a_name_is_an_error(tmp_path, configure):
    feature = {"names": ["a", "b"], "_type": "ClassLabel"}
    path = write_parquet(tmp_path / "rows.parquet", [0, 1, 2] * 20, feature)
    with pytest.raises(DataError, match=r"'label' holds the class 2, .* names for 0 to 1"):
        run(labeled(configure, path))


@pytest.mark.slow
@pytest.mark.parametrize(
    "feature",
    [
        {"dtype": "int64", "_type": "Value"},
        {"names": "ab", "_type": "ClassLabel"},
        {"names": [1, 2], "_type": "ClassLabel"},
        {"_type": "ClassLabel"},
        ["a"],
    ],
)
def test_other_metadata_changes_nothing(tmp_path, configure, feature):
    path = write_parquet(tmp_path / "rows.parquet", [0, 1] * 30, feature)
    assert run(labeled(configure, path)).labels == ["0", "1"]


@pytest.mark.slow
@pytest.mark.parametrize("metadata", [b"[]", b"{", b'{"info": 3}', b"[" * 100_000, b"\xff"])
def test_damaged_metadata_changes_nothing(tmp_path, configure, metadata):
    table = pa.table({"text": [sentence(n) for n in range(60)], "label": [0, 1] * 30})
    pq.write_table(table.replace_schema_metadata({"huggingface": metadata}), tmp_path / "a.parquet")
    assert run(labeled(configure, tmp_path / "a.parquet")).labels == ["0", "1"]


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint16(), pa.uint64()])
def test_columns_of_classes_of_any_width(tmp_path, kind):
    feature = {"names": ["a", "b"], "_type": "ClassLabel"}
    path = write_parquet(tmp_path / "rows.parquet", pa.array([0, 1] * 30, kind), feature)
    rows = [row for chunk in COLUMNAR["parquet"]("rows", path) for _, _, row in chunk.rows()]
    assert [row["label"] for row in rows] == ["a", "b"] * 30


def test_order_and_comparison_of_names():
    assert in_order(["10", "9", "-1", "+2"]) == ["-1", "+2", "9", "10"]
    assert in_order(["10", "9", "a"]) == ["10", "9", "a"]
    assert indices_of(["a", "b"], ["b", "a"]) == [1, 0]
    assert indices_of(["a", "b"], ["b", "c"]) is None
    assert indices_of(["1", "0"], ["LABEL_0", "LABEL_1"]) == [1, 0]
    assert indices_of(["ﬁne", "bad"], ["Bad", "FINE "]) == [1, 0]
    assert listed([str(n) for n in range(1000)]).endswith("10, 11 and 988 more")

"""Batch prediction writes a row for each good record, and names the others."""

from __future__ import annotations

import csv
import json
import math
import multiprocessing
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pandas as pd
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from steadytrain.components.predict import progress
from steadytrain.components.predict.batch import predict, refused_file
from steadytrain.components.predict.model import Input, ServedModel, _inputs, open_model
from steadytrain.components.shared.config import load
from steadytrain.components.shared.errors import BadInput, DataError, RunBusy, StorageError
from steadytrain.components.shared.lease import try_lock
from steadytrain.components.tabular.model import Preparation, TableModel
from steadytrain.components.tasks.encoding.fields import Defect
from steadytrain.components.tasks.served import ServedPackager
from steadytrain.pipelines.cli import app
from steadytrain.pipelines.model_commands import _data_to_read
from steadytrain.pipelines.options import columns_of

from support.disks import small_file_system
from support.stores import copy_store


class Doubles:
    """A model that doubles x. It rejects 13, and batches of more than `most` rows."""

    def __init__(self, most=1000):
        self.most, self.sizes = most, []

    def predict(self, frame):
        self.sizes.append(len(frame))
        if len(frame) > self.most:
            raise MemoryError("out of memory")
        if (frame["x"] == 13).any():
            raise ValueError("13 brings bad luck")
        return pd.DataFrame({"prediction": frame["x"] * 2, "side": ["a"] * len(frame)})


class Texts:
    def predict(self, texts):
        return [text.upper() for text in texts]


def doubling(loaded=None):
    inputs = [Input("x", "x", "number", required=False), Input("c", "c", "any", required=False)]
    return ServedModel("models:/m/1", inputs, None, loaded or Doubles())


@pytest.fixture
def data(tmp_path):
    """Return a function that writes records and returns how they are read."""

    def write(records, *overrides):
        path = tmp_path / "records.jsonl"
        path.write_text("\n".join(json.dumps(record) for record in records))
        basis = [("data.source", [str(path)]), ("data.format", "auto"), ("data.exclude", [])]
        return load("causal-lm", [*basis, *overrides]).data

    return write


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_columns_of_series_are_read_as_in_training():
    value = Input("sold", "sold", "number", required=False, of="series")
    known = Input("open", "open", "number", required=True, of="covariates")
    # A table's 01 is a code.
    assert [value.read({"sold": it}) for it in ("01", 2, "3e1", None)] == [1.0, 2.0, 30.0, None]
    assert [known.read({"open": it}) for it in (True, False, "01", 0.5)] == [1.0, 0.0, 1.0, 0.5]
    for item, wrong in ((value, True), (known, "yes"), (known, None)):
        with pytest.raises(Defect, match=item.column):
            item.read({item.column: wrong})
    with pytest.raises(Defect, match="not a number"):
        replace(value, of="records").read({"sold": "01"})


def test_a_series_that_is_called_na_is_not_missing():
    named = Input("shop", "shop", "any", required=True, of="series")
    assert [named.read({"shop": name}) for name in ("NA", "null", 7)] == ["NA", "null", 7]
    for absent in (None, ""):
        with pytest.raises(Defect, match="shop is absent"):
            named.read({"shop": absent})
    with pytest.raises(Defect, match="shop is absent"):
        replace(named, of="records").read({"shop": "NA"})


NUMBERS = [{"x": n, "c": f"c{n}"} for n in range(10)]


def test_each_record_has_a_row_with_its_line(data, tmp_path):
    out = tmp_path / "out.jsonl"
    done = predict(doubling(), data(NUMBERS), out, batch_size=4)
    assert [(row["line"], row["prediction"]) for row in lines(out)] == [
        (n + 1, 2.0 * n) for n in range(10)
    ]
    assert (done.records, done.predicted, done.warning) == (10, 10, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "records.jsonl"]


def test_batch_that_fails_is_halved_down_to_the_record(data, tmp_path):
    records = [{"x": n, "c": "c"} for n in range(64)]
    out, model = tmp_path / "out.jsonl", doubling(Doubles(most=16))
    done = predict(model, data(records), out, batch_size=64)
    assert [row["prediction"] / 2 for row in lines(out)] == [n for n in range(64) if n != 13]
    assert done.refused == {"not_predicted": 1}
    (refused,) = lines(tmp_path / "out.jsonl.quarantine.jsonl")
    assert (refused["line"], refused["detail"]) == (14, "13 brings bad luck")
    assert "13 brings bad luck" in done.warning


def test_more_bad_records_than_allowed_are_an_error_and_leave_the_good_ones(data, tmp_path):
    records = [*NUMBERS, {"x": "seven", "c": "c"}, {"y": 1}]
    out = tmp_path / "out.jsonl"
    with pytest.raises(DataError) as caught:
        predict(doubling(), data(records), out)
    assert "x is 'seven', not a number" in caught.value.message
    assert "missing_field" in caught.value.message
    assert not out.exists()
    assert len(lines(tmp_path / "out.jsonl.partial")) == 10
    allowed = data(records, ("data.max_bad_share", 0.5))
    done = predict(doubling(), allowed, out)
    assert (done.predicted, done.refused) == (10, {"wrong_type": 1, "missing_field": 1})
    assert not (tmp_path / "out.jsonl.partial").exists()


def test_failed_command_leaves_what_an_earlier_one_refused(data, tmp_path):
    out = tmp_path / "out.jsonl"
    predict(doubling(), data([{"x": 1}, {"x": "no", "c": ""}], "data.max_bad_share=0.5"), out)
    kept = refused_file(out).read_bytes(), out.read_bytes()
    with pytest.raises(DataError, match="has them") as caught:
        predict(doubling(), data([{"x": 1, "c": ""}, *[{"x": "no"}] * 3]), out)
    assert "out.jsonl.partial has the predictions for the others" in caught.value.message
    assert (refused_file(out).read_bytes(), out.read_bytes()) == kept
    assert len(lines(tmp_path / "out.jsonl.partial.quarantine.jsonl")) == 3
    # A good one leaves none.
    predict(doubling(), data([{"x": 1, "c": ""}]), out)
    assert [path.name for path in tmp_path.glob("out*")] == ["out.jsonl"]


def test_model_that_refuses_the_first_batch_ends_the_prediction(data, tmp_path):
    model = doubling(Doubles(most=0))
    with pytest.raises(DataError, match="none of the first 4 records: out of memory"):
        predict(model, data(NUMBERS), tmp_path / "out.jsonl", batch_size=4)
    assert len(model.loaded.sizes) < 10


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_prediction_that_is_not_finite_is_refused(data, tmp_path, wrong):
    class Breaks(Doubles):
        def predict(self, frame):
            found = super().predict(frame)
            found.loc[frame["x"] == 3, "prediction"] = wrong
            return found

    allowed = data(NUMBERS, ("data.max_bad_share", 0.2))
    done = predict(doubling(Breaks()), allowed, tmp_path / "out.jsonl")
    assert done.refused == {"not_predicted": 1}
    assert [row["line"] for row in lines(tmp_path / "out.jsonl")] == [1, 2, 3, *range(5, 11)]


def test_too_few_answers_are_never_written(data, tmp_path):
    class Loses(Doubles):
        def predict(self, frame):
            return super().predict(frame).iloc[1:]

    with pytest.raises(DataError, match="0 answers for 1 records"):
        predict(doubling(Loses()), data(NUMBERS), tmp_path / "out.jsonl")


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_tables_hold_inputs_and_predictions(data, tmp_path, suffix):
    out = tmp_path / f"out{suffix}"
    records = [*NUMBERS, {"x": 10, "c": 5}]
    predict(doubling(), data(records), out, batch_size=4, with_inputs=True)
    if suffix == ".csv":
        with out.open(newline="") as handle:
            found = list(csv.DictReader(handle))
        assert [row["c"] for row in found][-2:] == ["c9", "5"]
        assert [row["prediction"] for row in found[:2]] == ["0.0", "2.0"]
    else:
        table = pq.read_table(out)
        assert table.column_names == ["source", "line", "x", "c", "prediction", "side"]
        assert table["c"].to_pylist()[-2:] == ["c9", "5"]


def test_csv_refuses_lists(data, tmp_path):
    class Vectors(Doubles):
        def predict(self, frame):
            return [[1.0, 2.0]] * len(frame)

    with pytest.raises(BadInput, match="a CSV file does not hold"):
        predict(doubling(Vectors()), data(NUMBERS), tmp_path / "out.csv")


def test_columns_that_are_not_read_are_named(data, tmp_path):
    records = [{**record, "y": 1} for record in NUMBERS]
    assert predict(doubling(), data(records), tmp_path / "out.jsonl").unread == ["y"]


def test_values_that_count_as_missing_are_counted_by_column(data, tmp_path):
    kinds = {"x": "number", "c": "category"}
    learned = TableModel(Preparation(kinds, {"c": ["c0", "c1"]}), [], [1.0])

    class Loaded:
        def predict(self, frame):
            return pd.DataFrame(learned.rows(frame.to_dict("records")))

    inputs = [Input("x", "x", "number", False), Input("c", "town", "any", False)]
    model = ServedModel("models:/m/1", inputs, None, Loaded(), unseen=learned.unseen)
    towns = ["c0", " c0", "C1", "c1", None, "NA"]
    records = [{"x": n, "town": town} for n, town in enumerate(towns)] + [{"town": "c0"}]
    done = predict(model, data(records), tmp_path / "out.jsonl", batch_size=2)
    assert (done.predicted, done.missing) == (7, {"town": 4, "x": 1})


@pytest.mark.parametrize("tells", [True, False])
def test_logged_model_tells_which_categories_it_has_not_seen(tmp_path, tells):
    import mlflow

    class Served(mlflow.pyfunc.PythonModel):
        def load_context(self, context):
            kinds = {"c": "category"}
            self.model = TableModel(Preparation(kinds, {"c": ["a"]}), [], [1]) if tells else None

        def predict(self, context, model_input, params=None):
            return model_input

    columns = mlflow.types.Schema([mlflow.types.ColSpec("string", "c", required=False)])
    signature = mlflow.models.ModelSignature(inputs=columns)
    folder = tmp_path / "model"
    mlflow.pyfunc.save_model(
        folder, python_model=Served(), signature=signature, pip_requirements=[]
    )
    counted = open_model(str(folder), tmp_path, {"c": "town"}).taken_for_missing([{"c": "b"}])
    assert counted == ({"town": 1} if tells else {})


def test_times_that_a_forecast_fills_are_counted_by_series(data, tmp_path):
    class Loaded:
        def predict(self, frame):
            return pd.DataFrame({"prediction": [float(len(frame))]})

    class Model:
        def filled(self, records):
            return {"a": 10 - len(records), "b": 1}

    inputs = [Input("x", "x", "number", required=True)]
    told = ServedModel("m", inputs, None, Loaded(), forecasts=True, filled=Model().filled)
    numbers = data(NUMBERS[:7])
    assert predict(told, numbers, tmp_path / "out.jsonl").filled == {"a": 3, "b": 1}
    silent = replace(told, filled=None)
    assert predict(silent, numbers, tmp_path / "other.jsonl").filled == {}


@pytest.mark.parametrize(
    "damage",
    [
        "artifacts/model/factor changed",
        "artifacts/model/factor gone",
        # MLflow's copy of the program that loads the model.
        "served_model.py changed",
    ],
)
def test_damaged_model_is_refused_instead_of_predicting_something_else(
    tmp_path, empty_store, damage
):
    import mlflow

    exported = tmp_path / "model"
    exported.mkdir()
    (exported / "factor").write_text("2")
    (exported / "model.py").write_text(TIMES)
    packager = ServedPackager(Mock(), Mock(labels=[]))
    mlflow.set_tracking_uri(copy_store(empty_store, tmp_path))
    experiment = mlflow.create_experiment("test", artifact_location=(tmp_path / "a").as_uri())
    with mlflow.start_run(experiment_id=experiment):
        uri = packager.log_folder(
            exported,
            name="times",
            inputs=[mlflow.types.ColSpec("double", "x", required=False)],
            example=pd.DataFrame({"x": [1.0]}),
            metadata={},
            packages=["mlflow"],
        )
    folder = mlflow.artifacts.download_artifacts(uri)
    # The second time, the bytecode of model.py is there.
    for _ in range(2):
        assert open_model(folder, tmp_path, {}).answers([{"x": 3.0}]) == [{"prediction": 6.0}]
    name, _, how = damage.partition(" ")
    damaged = Path(folder, name)
    damaged.unlink() if how == "gone" else damaged.write_bytes(damaged.read_bytes()[:-1])
    named = "differs from what was logged" if how == "changed" else "is missing"
    with pytest.raises(BadInput, match=f"is damaged: {name} {named}"):
        open_model(folder, tmp_path, {})
    with pytest.raises(BadInput, match=f"is damaged: {name} {named}"):
        packager.load_logged(uri)
    Path(folder, "MLmodel").write_text("metadata: {")
    with pytest.raises(BadInput, match=r"cannot be loaded: \w+Error"):
        open_model(folder, tmp_path, {})
    with pytest.raises(BadInput, match=r"cannot be loaded: \w+Error"):
        packager.load_logged(uri)
    mlflow.set_tracking_uri(None)


@pytest.mark.parametrize(
    ("names", "columns"),
    [
        (["text", "image", "note", "photo"], ["text", "image", "note", "photo"]),
        (["text", "text_pair"], ["note", "reply"]),
        ([None], ["note"]),
        (["image"], ["photo"]),
    ],
)
def test_only_models_of_one_kind_have_other_names_for_their_columns(names, columns):
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema

    trained = load("causal-lm")
    given = {"text": "note", "text_pair": "reply", "image": "photo"}
    known = trained.data.columns.model_copy(update=given)
    data = trained.data.model_copy(update={"columns": known})
    trained = trained.model_copy(update={"data": data})
    signature = ModelSignature(Schema([ColSpec("string", name) for name in names]))
    found = _inputs("m", signature, trained, frozenset())
    assert [item.column for item in found] == columns


TIMES = """
class Times:
    names = ["prediction"]

    def __init__(self, folder):
        self.factor = float((folder / "factor").read_text())

    def rows(self, records):
        return [{"prediction": self.factor * record["x"]} for record in records]


load = Times
"""


def test_image_may_be_stored_as_the_library_datasets_does():
    image = Input("photo", "photo", "bytes", required=False)
    assert image.read({"photo": {"bytes": b"png", "path": None}}) == b"png"
    with pytest.raises(Defect, match="not a file"):
        image.read({"photo": {"bytes": "png"}})


def test_column_that_no_record_has_is_an_error(data, tmp_path):
    records = [{"x": record["x"], "C": record["c"]} for record in NUMBERS]
    with pytest.raises(DataError, match=r"no record has the column 'c'.*also have C"):
        predict(doubling(), data(records), tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_data_that_include_the_file_to_write_are_refused(data, tmp_path):
    read = data(NUMBERS)
    with pytest.raises(BadInput, match="is among the data"):
        predict(doubling(), read, tmp_path / "records.jsonl")
    assert lines(tmp_path / "records.jsonl") == NUMBERS


def test_texts_come_from_a_column(data, tmp_path):
    model = ServedModel("m", [Input("", "body", "text", required=True)], None, Texts())
    records = [{"body": "one"}, {"body": " "}, {"body": "two"}]
    out = tmp_path / "out.jsonl"
    done = predict(model, data(records, ("data.max_bad_share", 0.5)), out)
    assert [row["prediction"] for row in lines(out)] == ["ONE", "TWO"]
    assert done.refused == {"empty_field": 1}


def test_long_record_is_refused(data, tmp_path):
    model = ServedModel("m", [Input("", "text", "text", required=True)], None, Texts())
    records = [{"text": "x" * 2000}, *({"text": "short"} for _ in range(3))]
    limits = ("data.max_record_bytes", 1024), ("data.max_bad_share", 0.5)
    done = predict(model, data(records, *limits), tmp_path / "out.jsonl")
    assert done.refused == {"too_long": 1}


def test_empty_source_is_an_error(data, tmp_path):
    with pytest.raises(DataError, match="no record is there"):
        predict(doubling(), data([]), tmp_path / "out.jsonl")


def test_name_of_a_prediction_among_the_inputs_is_an_error(data, tmp_path):
    model = ServedModel("m", [Input("x", "side", "number", required=False)], None, Doubles())
    with pytest.raises(BadInput, match="both have 'side'"):
        predict(model, data([{"side": 1}]), tmp_path / "out.jsonl", with_inputs=True)


def test_file_that_another_process_writes_is_left_alone(data, tmp_path):
    partial = tmp_path / "out.jsonl.partial"
    with partial.open("ab") as handle:
        assert try_lock(handle)
        handle.write(b"theirs")
        handle.flush()
        with pytest.raises(RunBusy, match="another process"):
            predict(doubling(), data(NUMBERS), tmp_path / "out.jsonl")
        assert partial.read_bytes() == b"theirs"
    predict(doubling(), data(NUMBERS), tmp_path / "out.jsonl")
    assert len(lines(tmp_path / "out.jsonl")) == 10


@pytest.mark.parametrize(
    ("suffix", "pages"), [("csv", 1), ("csv", 2), ("jsonl", 2), ("parquet", 2)]
)
def test_full_disk_is_an_error_that_names_the_file_and_the_command_continues(
    data, tmp_path, suffix, pages
):
    records = [{"x": 13 if n % 5 == 0 else n, "c": f"c{n}"} for n in range(100)]
    read = data(records, ("data.max_bad_share", 1.0))
    whole = tmp_path / f"out.{suffix}"
    predict(doubling(), read, whole, batch_size=8)
    with small_file_system(tmp_path / "small", f"size={pages * 4}k") as disk:
        out = disk / whole.name
        with pytest.raises(StorageError, match=rf"cannot write {out}\..*: No space left"):
            predict(doubling(), read, out, batch_size=8)
        assert not [*disk.glob("*.partial.parquet")]
        subprocess.run(["mount", "-o", "remount,size=1m", disk], check=True)
        predict(doubling(), read, out, batch_size=8)
        assert out.read_bytes() == whole.read_bytes()
        assert refused_file(out).read_bytes() == refused_file(whole).read_bytes()


@pytest.mark.parametrize("address", ["no-such-folder", "x" * 5000])
def test_address_of_no_model_is_an_error_however_long(tmp_path, address):
    with pytest.raises(BadInput, match="no MLmodel file there"):
        open_model(address, tmp_path, {})


class Killed(Doubles):
    """A model whose process is killed at its fourth batch."""

    def predict(self, frame):
        if len(self.sizes) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().predict(frame)


@pytest.fixture
def killed(monkeypatch):
    """Return a function that predicts in a process that is killed at the fourth batch."""
    monkeypatch.setattr(progress, "_SECONDS", 0.0)

    def run(*args, **options):
        child = multiprocessing.get_context("fork").Process(
            target=predict, args=(doubling(Killed()), *args), kwargs=options
        )
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL

    return run


RECORDS = [{"x": 20 + n, "c": None if n % 3 else f"c\u2028{n}"} for n in range(40)]
RECORDS[2] = RECORDS[21] = {"x": "no number", "c": "\u2028"}


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_killed_command_continues_to_the_same_bytes(data, tmp_path, killed, suffix):
    source = data(RECORDS, ("data.max_bad_share", 0.1))
    options = {"batch_size": 4, "with_inputs": True}
    whole, out = (tmp_path / f"{name}.{suffix}" for name in ("whole", "out"))
    expected = predict(doubling(), source, whole, **options)
    killed(source, out, **options)
    assert not out.exists()
    model = doubling()
    with (tmp_path / f"out.{suffix}.partial").open("ab") as handle:
        handle.write(b"a batch of which only a part was written")
    found = predict(model, source, out, **options)
    assert out.read_bytes() == whole.read_bytes()
    refused = [tmp_path / f"{name}.{suffix}.quarantine.jsonl" for name in ("whole", "out")]
    assert refused[0].read_bytes() == refused[1].read_bytes()
    # Three batches of four, and the record that was refused before.
    assert (found.continued, sum(model.loaded.sizes)) == (13, 26)
    assert replace(found, seconds=0, continued=0) == replace(expected, seconds=0)
    assert {path.name for path in tmp_path.glob("out*")} == {out.name, refused[1].name}


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize(
    "damage",
    [
        *("partial", "partial is shorter", "partial.quarantine.jsonl", "progress", "no progress"),
    ],
)
def test_killed_command_starts_again_if_what_it_wrote_is_damaged(
    data, tmp_path, killed, suffix, damage
):
    source = data(RECORDS, ("data.max_bad_share", 0.1))
    whole, out = (tmp_path / f"{name}.{suffix}" for name in ("whole", "out"))
    predict(doubling(), source, whole, batch_size=4)
    killed(source, out, batch_size=4)
    name, *how = damage.split(" is ")
    file = tmp_path / f"out.{suffix}.{name.removeprefix('no ')}"
    content = bytearray(file.read_bytes())
    place = content.index(b'"records":') + 10 if name == "progress" else len(content) // 3
    content[place] ^= 1
    file.write_bytes(content[: len(content) // 2] if how else content)
    if name.startswith("no "):
        file.unlink()
    assert predict(doubling(), source, out, batch_size=4).continued == 0
    assert out.read_bytes() == whole.read_bytes()
    refused = [tmp_path / f"{name}.{suffix}.quarantine.jsonl" for name in ("whole", "out")]
    assert refused[0].read_bytes() == refused[1].read_bytes()


def test_killed_command_starts_again_if_something_has_changed(data, tmp_path, killed):
    source, out = data(NUMBERS), tmp_path / "out.jsonl"
    for changed in ({"batch_size": 3}, {"with_inputs": True}):
        killed(source, out, batch_size=2)
        found = predict(doubling(), source, out, **({"batch_size": 2} | changed))
        assert (found.continued, len(lines(out))) == (0, 10)
    killed(source, out, batch_size=2)
    # A version that was deleted may be registered again, with another model.
    again = predict(replace(doubling(), identity="another"), source, out, batch_size=2)
    assert again.continued == 0
    killed(source, out, batch_size=2)
    other = data([{"x": n + 1, "c": ""} for n in range(10)])
    assert predict(doubling(), other, out, batch_size=2).continued == 0
    assert [row["prediction"] for row in lines(out)] == [2.0 * n + 2 for n in range(10)]


def test_files_that_are_not_read_and_what_was_detected_are_counted(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.csv").write_text("x;c\n1;u\n2;v\n")
    (folder / "b.csv").write_text("x,c\n3,w\n")
    (folder / "notes.pdf").write_bytes(b"%PDF")
    (folder / ".hidden").write_text("x")
    source = load("causal-lm", [("data.source", [str(folder)]), ("data.format", "auto")]).data
    summary = predict(doubling(), source, tmp_path / "out.jsonl")
    assert (summary.records, summary.predicted) == (3, 3)
    assert summary.left_out == {"hidden files": 1, "files with a suffix that is not read": 1}
    assert list(summary.detected.values()) == [1]
    assert "';'" in next(iter(summary.detected))


class Labels:
    """A model with sets of labels. Only large numbers have one."""

    def predict(self, frame):
        return pd.DataFrame({"prediction": [["large"] if x > 5 else [] for x in frame["x"]]})


def test_records_without_a_label_leave_the_type_of_the_labels(data, tmp_path):
    out = tmp_path / "out.parquet"
    predict(doubling(Labels()), data(NUMBERS), out, batch_size=2)
    found = pq.read_table(out)["prediction"].to_pylist()
    assert found[:6] == [[]] * 6
    assert found[6:] == [["large"]] * 4


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_infinite_category_is_copied_as_a_text(data, tmp_path, suffix):
    out = tmp_path / f"out{suffix}"
    source = data([{"x": 1, "c": 2.5}])
    Path(source.source[0]).write_text('{"x": 1, "c": 1e999}\n')
    predict(doubling(), source, out, with_inputs=True)
    read = {".jsonl": lambda path: pd.read_json(path, lines=True), ".csv": pd.read_csv}
    assert str(read.get(suffix, pd.read_parquet)(out)["c"][0]) == "inf"


def test_csv_files_are_read_as_in_training(tmp_path):
    (tmp_path / "new.csv").write_text("x!c\n1!|a!b|\n", encoding="latin-1")
    written = ["data.csv.delimiter='!'", "data.csv.quotechar='|'", "data.csv.encoding=latin-1"]
    trained = replace(doubling(), trained=load("causal-lm", written))
    out = tmp_path / "out.jsonl"
    summary = predict(
        trained, _data_to_read([str(tmp_path / "new.csv")], trained, []), out, with_inputs=True
    )
    assert (summary.predicted, lines(out)[0]["c"]) == (1, "a!b")
    changed = _data_to_read(["new.csv"], trained, ["data.csv.delimiter=','"])
    assert (changed.csv.delimiter, changed.csv.quotechar) == (",", "|")


def test_column_for_an_input_is_given_once():
    assert columns_of(["x=a=b", "c=d"]) == {"x": "a=b", "c": "d"}
    with pytest.raises(BadInput, match="--column x=b: x has the column a already"):
        columns_of(["x=a", "x=b"])
    with pytest.raises(BadInput, match="--column x: it is not INPUT=COLUMN"):
        columns_of(["x"])


@pytest.mark.parametrize("words", [["--batch-size", "8"], ["--with-inputs"]])
def test_options_that_a_forecast_does_not_read_are_refused(tmp_path, monkeypatch, words):
    forecasting = replace(doubling(), forecasts=True)
    monkeypatch.setattr("steadytrain.components.predict.model.open_model", lambda *_: forecasting)
    (tmp_path / "a.csv").write_text("x,c\n1,a\n")
    done = CliRunner().invoke(app, ["predict", "m@champion", str(tmp_path / "a.csv"), *words])
    assert isinstance(done.exception, BadInput)
    assert words[0] in done.exception.message

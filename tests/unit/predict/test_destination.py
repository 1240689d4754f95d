"""Predictions on S3 appear when they are complete, and are not lost if the copy fails."""

from __future__ import annotations

import json
import multiprocessing
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from unit.predict.test_batch import NUMBERS, Killed, doubling

from steadytrain.components.predict import progress
from steadytrain.components.predict.batch import predict
from steadytrain.components.predict.destination import check_destination, local_file
from steadytrain.components.preprocess.inputs import find_inputs
from steadytrain.components.shared.config import load
from steadytrain.components.shared.errors import BadInput, DataError, RunBusy, StorageError
from steadytrain.components.shared.storage import S3Storage

from support.s3 import mocked_s3


@pytest.fixture
def bucket(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "tmp").mkdir()
    with mocked_s3(monkeypatch) as client:
        yield client


@pytest.fixture
def left(tmp_path):
    """Return a function that lists what is left below TMPDIR."""
    return lambda: sorted(path.name for path in (tmp_path / "tmp").rglob("*") if path.is_file())


def records(bucket, rows, *overrides):
    body = "\n".join(map(json.dumps, rows)).encode()
    bucket.put_object(Bucket="bucket", Key="in/a.jsonl", Body=body)
    basis = [("data.source", ["s3://bucket/in/"]), ("data.format", "auto"), ("data.exclude", [])]
    return load("causal-lm", [*basis, *overrides]).data


def names(bucket):
    return sorted(item["Key"] for item in bucket.list_objects_v2(Bucket="bucket")["Contents"])


def predicted(data, out, model=None, **options):
    with local_file(out) as path:
        return predict(model or doubling(), data, path, address=out, **options)


def test_predictions_and_refused_records_are_copied_to_s3(bucket, left, tmp_path):
    data = records(bucket, [*NUMBERS, {"x": "wrong"}], ("data.max_bad_share", 0.5))
    out = "s3://bucket/out/p.parquet"
    check_destination(out, overwrite=False)
    assert predicted(data, out).predicted == 10
    assert names(bucket) == ["in/a.jsonl", "out/p.parquet", "out/p.parquet.quarantine.jsonl"]
    S3Storage("s3://bucket/out").download("p.parquet", tmp_path / "p.parquet")
    assert pq.read_table(tmp_path / "p.parquet")["prediction"].to_pylist() == list(range(0, 20, 2))
    assert left() == []
    with pytest.raises(BadInput, match="exists"):
        check_destination(out, overwrite=False)
    check_destination(out, overwrite=True)
    predicted(records(bucket, NUMBERS[:3]), out)
    assert names(bucket) == ["in/a.jsonl", "out/p.parquet"]


def test_object_appears_when_it_is_complete_and_a_killed_upload_leaves_nothing(bucket, left):
    for key in ("out/p.jsonl", "out/p.jsonl2"):
        bucket.create_multipart_upload(Bucket="bucket", Key=key)
    out = "s3://bucket/out/p.jsonl"
    check_destination(out, overwrite=False)
    unfinished = bucket.list_multipart_uploads(Bucket="bucket")["Uploads"]
    assert [item["Key"] for item in unfinished] == ["out/p.jsonl2"]
    data = records(bucket, [*NUMBERS, *[{"x": "wrong"}] * 20])
    with pytest.raises(DataError, match=r"steadytrain-predict-.*has the predictions"):
        predicted(data, out)
    assert names(bucket) == ["in/a.jsonl"]
    assert left() == ["p.jsonl.partial", "p.jsonl.partial.quarantine.jsonl"]


def test_copy_that_fails_leaves_the_file_and_says_where(bucket, left, monkeypatch):
    def fail(self, path, name):
        raise StorageError("the bucket is full", remedy="make room")

    monkeypatch.setattr(S3Storage, "upload", fail)
    with pytest.raises(StorageError) as caught:
        predicted(records(bucket, NUMBERS), "s3://bucket/p.jsonl")
    kept = caught.value.remedy.rpartition(" ")[2]
    assert caught.value.remedy == f"make room; the predictions are in {kept}"
    assert len(Path(kept).read_text().splitlines()) == 10
    assert left() == ["p.jsonl"]


@pytest.mark.slow
def test_killed_command_continues_to_the_same_object(bucket, left, monkeypatch):
    monkeypatch.setattr(progress, "_SECONDS", 0.0)
    data, out = records(bucket, NUMBERS), "s3://bucket/out/p.jsonl"
    predicted(data, "s3://bucket/out/whole.jsonl", batch_size=2)
    child = multiprocessing.get_context("fork").Process(
        target=predicted, args=(data, out, doubling(Killed())), kwargs={"batch_size": 2}
    )
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    kept = [name for name in left() if name.startswith("p.")]
    assert kept == ["p.jsonl.partial", "p.jsonl.partial.quarantine.jsonl", "p.jsonl.progress"]
    with pytest.raises(RunBusy, match=out), local_file(out):
        predicted(data, out)
    assert predicted(data, out, batch_size=2).continued == 6
    assert not [name for name in left() if name.startswith("p.")]
    whole, found = (
        bucket.get_object(Bucket="bucket", Key=f"out/{name}.jsonl")["Body"].read()
        for name in ("whole", "p")
    )
    assert whole == found


def test_folder_that_others_can_use_is_refused(bucket, tmp_path):
    out = "s3://bucket/out/p.jsonl"
    with local_file(out) as path:
        path.write_text("")
        folder = path.parent
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(BadInput, match="can be used by others"):
        predicted(records(bucket, NUMBERS), out)


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        ("s3://bucket/p.txt", BadInput, r"\.txt is not a format"),
        ("s3://other/p.jsonl", (StorageError, FileNotFoundError), "other"),
        ("/nowhere/p.jsonl", BadInput, "/nowhere does not exist"),
        ("s3:///p.jsonl", BadInput, "names no bucket"),
    ],
)
def test_impossible_destinations_are_refused_before_the_model_is_loaded(
    bucket, out, error, message
):
    with pytest.raises(error, match=message):
        check_destination(out, overwrite=True)


def test_data_that_include_the_object_to_write_are_refused(bucket):
    data = records(bucket, NUMBERS)
    assert [file.name for file, _ in find_inputs(data).files] == ["s3://bucket/in/a.jsonl"]
    with pytest.raises(BadInput, match="is among the data"):
        predicted(data, "s3://bucket/in/a.jsonl")
    assert names(bucket) == ["in/a.jsonl"]

"""Data sets that MLflow runs have logged, as a source: found, compared, refused."""

from __future__ import annotations

import json
import shutil

import mlflow
import pandas as pd
import pytest
from mlflow.data.meta_dataset import MetaDataset
from mlflow.data.sources import LocalArtifactDatasetSource
from mlflow.entities import Dataset, DatasetInput

from steadytrain.components.preprocess.inputs import find_inputs
from steadytrain.components.preprocess.sources import check_source
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.errors import BadInput, ConfigError

from support.s3 import mocked_s3
from support.stores import empty_store

__all__ = ["empty_store"]


@pytest.fixture(scope="module")
def store(tmp_path_factory, empty_store):
    folder = tmp_path_factory.mktemp("store")
    shutil.copy(empty_store, folder / "mlflow.db")
    uri = f"sqlite:///{folder}/mlflow.db"
    client = mlflow.MlflowClient(uri)
    experiment = client.create_experiment("logged", artifact_location=str(folder / "files"))
    return uri, client, experiment, folder


@pytest.fixture
def log(store):
    """Return a function that logs data sets of MLflow in a run, and returns the run's id."""
    _, client, experiment, _ = store

    def log(*datasets):
        run = client.create_run(experiment).info.run_id
        inputs = [
            each if isinstance(each, Dataset) else Dataset(**each.to_dict()) for each in datasets
        ]
        client.log_inputs(run, [DatasetInput(each, []) for each in inputs])
        return run

    return log


@pytest.fixture
def table(tmp_path):
    frame = pd.DataFrame({"text": ["one", "two", "three"], "score": [0.5, 1.5, 2.5]})
    frame.to_csv(tmp_path / "table.csv", index=False)
    frame.to_parquet(tmp_path / "table.parquet")
    return frame


def settings(*sources, **data):
    content = {"name": "a", "data": {"source": list(sources), "task": "causal_lm", **data}}
    return from_mapping({**content, "model": {"config": {"model_type": "llama"}}}).data


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["table.csv", "table.parquet"])
def test_table_is_found_and_compared(store, log, table, tmp_path, name):
    path = tmp_path / name
    run = log(mlflow.data.from_pandas(table, source=str(path), name=name))
    wanted = find_inputs(settings(str(path))).digest()
    for address in (f"mlflow-dataset:{run}", f"mlflow-dataset:{run}/{name}"):
        found = find_inputs(settings(address), store=store[0])
        assert [file.location for file, _ in found.files] == [path]
        assert found.digest() == wanted, "prepared data are reused"
    changed = table.assign(score=[0.5, 1.5, 2.6])
    changed.to_csv(path, index=False) if name.endswith("csv") else changed.to_parquet(path)
    digest = mlflow.data.from_pandas(changed).digest
    with pytest.raises(BadInput, match=f"has the digest {digest}, and the run logged "):
        find_inputs(settings(address), store=store[0])
    path.unlink()
    with pytest.raises(BadInput, match="no file found there"):
        find_inputs(settings(address), store=store[0])


@pytest.mark.filterwarnings("ignore")
def test_table_on_s3_is_found_and_compared(store, log, table, tmp_path, monkeypatch):
    with mocked_s3(monkeypatch) as client:
        address = "s3://bucket/tables/table.csv"
        client.upload_file(str(tmp_path / "table.csv"), "bucket", "tables/table.csv")
        run = log(mlflow.data.from_pandas(table, source=address, name="table"))
        found = find_inputs(settings(f"mlflow-dataset:{run}"), store=store[0])
        assert [file.path for file, _ in found.files] == ["table.csv"]
        assert found.digest() == find_inputs(settings(address)).digest()
        client.put_object(Bucket="bucket", Key="tables/table.csv", Body=b"text,score\none,1\n")
        with pytest.raises(BadInput, match=f"content of {address} has the digest"):
            find_inputs(settings(f"mlflow-dataset:{run}"), store=store[0])


def test_data_of_an_earlier_run_are_compared_with_its_own_digest(store, log, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store[0])
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"{name}\n")
    source = json.dumps({"sources": [str(tmp_path / "*.txt")]})
    profile = json.dumps({"inputs_digest": find_inputs(settings(str(tmp_path / "*.txt"))).digest()})
    run = log(Dataset("ours", "0" * 36, "steadytrain", source, profile=profile))
    found = find_inputs(settings(f"mlflow-dataset:{run}"))
    assert [file.path for file, _ in found.files] == ["a.txt", "b.txt"]
    nested = json.dumps({"sources": [f"mlflow-dataset:{run}"]})
    later = log(Dataset("later", "1" * 36, "steadytrain", nested, profile=profile))
    again = find_inputs(settings(f"mlflow-dataset:{later}"))
    assert again.digest() == found.digest()
    (tmp_path / "c.txt").write_text("more\n")
    with pytest.raises(BadInput, match=r"the content of .*\*\.txt has the digest"):
        find_inputs(settings(f"mlflow-dataset:{run}"))


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_found_or_compared_is_refused(store, log, table, tmp_path):
    path = str(tmp_path / "table.csv")
    two = [mlflow.data.from_pandas(table, source=path, name=name) for name in ("one", "two")]
    meta = MetaDataset(LocalArtifactDatasetSource(path), name="meta")
    web = mlflow.data.from_pandas(table, source="https://example.org/table.csv", name="web")
    run = log(*two, meta, web)
    for address, why in (
        (f"{run}", "it has meta, one, two, web"),
        (f"{run}/three", "0 data sets of run"),
        (f"{run}/meta", "its digest is not one of its content"),
        (f"{run}/web", "its source is of the type http"),
        ("0123456789abcdef", "has no run 0123456789abcdef"),
    ):
        with pytest.raises(BadInput, match=why) as raised:
            find_inputs(settings(f"mlflow-dataset:{address}"), store=store[0])
        assert raised.value.message.startswith("data.source = 'mlflow-dataset:")
    with pytest.raises(BadInput, match="no MLflow store"):
        find_inputs(settings(f"mlflow-dataset:{run}"), tmp_path)
    with pytest.raises(BadInput, match="no tracking store is known"):
        find_inputs(settings(f"mlflow-dataset:{run}"))
    with pytest.raises(ConfigError, match="give mlflow-dataset:RUN_ID"):
        settings("mlflow-dataset:")
    check_source(f"mlflow-dataset:{run}")

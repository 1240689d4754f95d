from __future__ import annotations

import pytest

from steadytrain.components.train.checkpoint import CheckpointStore

from support.benches import make_bench, one_thread
from support.s3 import mocked_s3

__all__ = ["make_bench", "one_thread"]


@pytest.fixture(params=["folder", "s3"])
def address(request, tmp_path, monkeypatch):
    """Where checkpoints are stored: a local folder, then S3."""
    if request.param == "folder":
        yield str(tmp_path / "checkpoints")
        return
    with mocked_s3(monkeypatch):
        yield "s3://bucket/some/run"


@pytest.fixture
def store(address):
    return CheckpointStore(address, keep=2)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"

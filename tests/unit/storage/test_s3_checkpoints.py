"""Checkpoints on a failing S3 server are saved and read anyway, or refused, but never partial."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid

import pytest
import torch

from steadytrain.components.shared.errors import StorageError
from steadytrain.components.shared.storage import open_storage, s3
from steadytrain.components.train.checkpoint import CheckpointStore, newest

from support.checkpoints import same, save
from support.command import wait_for
from support.selected import each

LARGE = 9 << 20
"""Size in bytes of a checkpoint part that is uploaded in several pieces."""


@pytest.fixture
def address(proxy):
    return f"s3://bucket/{uuid.uuid4().hex}"


def parts(value):
    return {"model": {"weight": torch.full((LARGE // 4,), float(value))}}


@pytest.mark.slow
@each("fault", ["500", "503", "reset", "lose", "truncate"], ["500", "lose"])
def test_temporary_server_failure_is_survived(address, proxy, fault):
    store = CheckpointStore(address, keep=2)
    for step in (1, 2):
        # The faults hit any of the requests, including the commit.
        proxy.queued.extend([fault, "forward"] * 9)
        manifest = save(store, step, parts=parts(step), world_size=2)
        store.retain(manifest, best_step=0)
    proxy.queued.extend([fault, "forward", "forward"] * 4)
    found = newest(address)
    assert found.step == 2
    assert same(found.tensors("model"), parts(2)["model"])
    assert fault in proxy.done


@pytest.mark.slow
@pytest.mark.parametrize("picked", ["safetensors", "COMMIT"])
def test_lasting_server_failure_is_reported_and_loses_nothing(address, proxy, monkeypatch, picked):
    monkeypatch.setattr(s3, "ATTEMPTS", 2)
    save(CheckpointStore(address, keep=2), 1, parts=parts(1))
    proxy.concerns = lambda method, path: picked in path and method != "GET"
    proxy.queued.extend(["500"] * 90)

    with pytest.raises(StorageError, match="step-00000002"):
        save(CheckpointStore(address, keep=2), 2, parts=parts(2))

    assert newest(address).step == 1
    proxy.queued.clear()
    save(CheckpointStore(address, keep=2), 2, parts=parts(2))
    assert newest(address).step == 2


UPLOADS = """
import sys
from steadytrain.components.train.checkpoint import CheckpointStore
storage = CheckpointStore(sys.argv[1], keep=2).path(2).storage
storage.write_stream("save-rank-0000.model.safetensors", [bytes(1 << 20)] * 20)
"""


@pytest.mark.slow
def test_rank_killed_during_upload_leaves_no_valid_checkpoint(address, proxy):
    store = CheckpointStore(address, keep=2)
    save(store, 1, parts=parts(1))
    proxy.seen.clear()
    proxy.concerns = lambda method, path: "partNumber" in path
    proxy.queued.extend(["forward", *["hang"] * 9])
    process = subprocess.Popen([sys.executable, "-c", UPLOADS, address], env=dict(os.environ))
    wait_for(lambda: sum("partNumber" in seen for seen in proxy.seen) > 1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    proxy.queued.clear()

    assert newest(address).step == 1
    assert store.storage.folders() == ["step-00000001", "step-00000002"]
    store.begin()
    assert open_storage(address).folders() == ["step-00000001"]

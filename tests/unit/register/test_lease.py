"""The lock, in a folder and on S3: one holder at a time, and a dead holder is replaced."""

import json
import os
import signal
import threading
import time

import boto3
import pytest
from moto import mock_aws

from steadytrain.components.shared import lease as module
from steadytrain.components.shared.errors import RunBusy, StorageError
from steadytrain.components.shared.lease import lease
from steadytrain.components.shared.storage import S3Storage
from steadytrain.components.shared.storage.row import Row

from support.holding import holding
from support.s3 import one_request_at_a_time


@pytest.fixture
def bucket(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.01)
    one_request_at_a_time(monkeypatch)
    with mock_aws():
        boto3.client("s3").create_bucket(Bucket="locks")
        yield "s3://locks/team"


@pytest.fixture(params=["folder", "s3"])
def address(request, tmp_path, bucket):
    return str(tmp_path) if request.param == "folder" else bucket


def objects():
    return S3Storage("s3://locks/team").list()


def test_only_one_holds_the_lease(address):
    waiting = lease(address, "x", wait_seconds=0.05)
    with lease(address, "x"), pytest.raises(RunBusy, match="held by another"), waiting:
        pass


def test_lease_can_be_held_repeatedly(address):
    for _ in range(3):
        with lease(address, "x", wait_seconds=0) as check:
            check()


def test_error_releases_the_lease(address):
    with pytest.raises(ZeroDivisionError), lease(address, "x"):
        1 / 0  # noqa: B018
    with lease(address, "x", wait_seconds=0):
        pass


def test_names_have_separate_locks(address):
    with lease(address, "x"), lease(address, "y", wait_seconds=0):
        pass


def test_threads_exclude_each_other(address):
    inside, most = 0, 0
    counted = threading.Lock()

    def work():
        nonlocal inside, most
        for _ in range(3):
            with lease(address, "x", wait_seconds=30):
                with counted:
                    inside += 1
                    most = max(most, inside)
                time.sleep(0.002)
                with counted:
                    inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_killed_process_releases_a_file_lock(tmp_path):
    code = (
        "import sys, time\n"
        "from steadytrain.components.shared.lease import lease\n"
        "with lease(sys.argv[1], 'x'):\n"
        "    print('held', flush=True)\n"
        "    time.sleep(600)\n"
    )
    with holding(code, tmp_path) as holder:
        with pytest.raises(RunBusy), lease(str(tmp_path), "x", wait_seconds=0):
            pass
        os.kill(holder.pid, signal.SIGKILL)
        with lease(str(tmp_path), "x", wait_seconds=30):
            pass


def test_dead_s3_holder_is_superseded_after_its_lease(bucket):
    storage = S3Storage(f"{bucket}/x.lock")
    storage.write(f"{7:020d}", json.dumps({"owner": "dead", "expires": time.time() - 1}).encode())
    with lease(bucket, "x", wait_seconds=0):
        assert objects() == [f"x.lock/{8:020d}"]


def test_live_s3_holder_is_waited_for(bucket):
    storage = S3Storage(f"{bucket}/x.lock")
    storage.write(f"{7:020d}", json.dumps({"owner": "a", "expires": time.time() + 60}).encode())
    with pytest.raises(RunBusy), lease(bucket, "x", wait_seconds=0.05):
        pass


def test_slow_holder_on_s3_is_stopped_before_it_acts(bucket):
    with lease(bucket, "x", expiry_seconds=0.05) as check:
        time.sleep(0.06)
        with pytest.raises(StorageError, match="expired"):
            check()
        with lease(bucket, "x", wait_seconds=0) as theirs:
            theirs()


def test_number_that_was_used_and_cleared_away_is_not_the_lock(bucket):
    """A waiter saw only 1, slept while 2 came and went, and asks for 2 while 3 holds the lock."""
    storage = S3Storage(f"{bucket}/x.lock")
    held = json.dumps({"owner": "a", "expires": time.time() + 60}).encode()
    reads = iter([[f"{1:020d}"], [f"{2:020d}", f"{3:020d}"]])

    class Stale:
        uri = storage.uri
        read, write, delete = storage.read, storage.write, storage.delete

        def list(self, prefix):
            return next(reads)

    storage.write(f"{1:020d}", json.dumps({"owner": "b", "expires": 0}).encode())
    storage.write(f"{3:020d}", held)
    assert not module._Numbered(Row(Stale()), 60).take()
    assert storage.list() == [f"{1:020d}", f"{3:020d}"]

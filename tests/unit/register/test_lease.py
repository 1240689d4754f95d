"""The lock, in a folder and on S3: one holder at a time, and a dead holder is replaced."""

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


def held_by_another(expiry_seconds, number=7):
    """Write the object of a holder that never renews it."""
    holder = module._Holder(
        owner="a", pid=1, renewals=0, expiry_seconds=expiry_seconds, released=False
    )
    content = holder.model_dump_json().encode()
    S3Storage("s3://locks/team/x.lock").write(f"{number:020d}", content)


def test_dead_s3_holder_is_superseded_once_it_was_silent_for_its_expiry_time(bucket):
    held_by_another(expiry_seconds=0.2)
    with pytest.raises(RunBusy), lease(bucket, "x", wait_seconds=0):
        pass
    with lease(bucket, "x", wait_seconds=30):
        assert objects() == [f"x.lock/{8:020d}"]


def test_damaged_object_counts_as_a_silent_holder(bucket):
    S3Storage(f"{bucket}/x.lock").write(f"{7:020d}", b"{")
    with lease(bucket, "x", wait_seconds=30, expiry_seconds=0.2):
        assert objects() == [f"x.lock/{8:020d}"]


def test_live_s3_holder_is_waited_for(bucket):
    held_by_another(expiry_seconds=60)
    with pytest.raises(RunBusy), lease(bucket, "x", wait_seconds=0.05):
        pass


def test_clock_that_was_set_forward_takes_nothing_away(bucket, monkeypatch):
    now = time.time
    with lease(bucket, "x") as check:
        monkeypatch.setattr(time, "time", lambda: now() + 86_400)
        with pytest.raises(RunBusy), lease(bucket, "x", wait_seconds=0.05):
            pass
        check()


def test_s3_holder_keeps_the_lock_for_longer_than_its_expiry_time(bucket):
    with lease(bucket, "x", expiry_seconds=0.8) as check:
        with pytest.raises(RunBusy), lease(bucket, "x", wait_seconds=2):
            pass
        check()


class Frozen:
    """Renews nothing, as a process that was paused."""

    def __init__(self, *_, **__):
        pass

    def end(self):
        pass


def test_paused_s3_holder_is_stopped_before_it_acts(bucket, monkeypatch):
    monkeypatch.setattr(module, "Renewed", Frozen)
    with lease(bucket, "x", expiry_seconds=3) as check:
        check()
        time.sleep(1.6)
        with pytest.raises(StorageError, match=r"was not renewed for .* and expires after"):
            check()
        with lease(bucket, "x", wait_seconds=30) as theirs:
            with pytest.raises(StorageError, match="another process took over"):
                check()
            theirs()
        assert objects() == [f"x.lock/{2:020d}"]
    assert objects() == [f"x.lock/{2:020d}"]


def test_number_that_was_used_and_cleared_away_is_not_the_lock(bucket):
    """A waiter saw only 1, slept while 2 came and went, and asks for 2 while 3 holds the lock."""
    storage = S3Storage(f"{bucket}/x.lock")
    reads = iter([[f"{1:020d}"], [f"{2:020d}", f"{3:020d}"]])

    class Stale:
        uri = storage.uri
        read, write, delete = storage.read, storage.write, storage.delete

        def list(self, prefix):
            return next(reads)

    held_by_another(0, number=1)
    held_by_another(60, number=3)
    assert not module._Numbered(Row(Stale()), 60).take()
    assert storage.list() == [f"{1:020d}", f"{3:020d}"]

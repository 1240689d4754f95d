"""The lock, in a folder and on S3: one holder at a time, and a dead holder is replaced."""

import contextlib
import os
import signal
import threading
import time

import pytest

from steadytrain.components.shared import lease as leases
from steadytrain.components.shared import lease as module
from steadytrain.components.shared.errors import RunBusy, StorageError
from steadytrain.components.shared.lease import Holder, lock
from steadytrain.components.shared.storage import S3Storage

from support.command import wait_for
from support.holding import holding
from support.s3 import mocked_s3, one_request_at_a_time


@pytest.fixture
def bucket(monkeypatch):
    for polled in (module, leases):
        monkeypatch.setattr(polled, "_POLL_SECONDS", 0.01)
    one_request_at_a_time(monkeypatch)
    with mocked_s3(monkeypatch, "locks"):
        yield "s3://locks/team"


@pytest.fixture(params=["folder", "s3"])
def address(request, tmp_path, bucket):
    return str(tmp_path) if request.param == "folder" else bucket


def objects():
    return S3Storage("s3://locks/team").list()


def test_only_one_holds_the_lease(address):
    waiting = lock(address, "x", wait_seconds=0.05)
    with lock(address, "x"), pytest.raises(RunBusy, match="held by"), waiting:
        pass


def test_lease_can_be_held_repeatedly(address):
    for _ in range(3):
        with lock(address, "x", wait_seconds=0) as check:
            check()


def test_error_releases_the_lease(address):
    with pytest.raises(ZeroDivisionError), lock(address, "x"):
        1 / 0  # noqa: B018
    with lock(address, "x", wait_seconds=0):
        pass


def test_names_have_separate_locks(address):
    with lock(address, "x"), lock(address, "y", wait_seconds=0):
        pass


@pytest.mark.slow
def test_threads_exclude_each_other(address):
    inside, most = 0, 0
    counted = threading.Lock()

    def work():
        nonlocal inside, most
        for _ in range(3):
            with lock(address, "x", wait_seconds=300):
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
        "from steadytrain.components.shared.lease import lock\n"
        "with lock(sys.argv[1], 'x'):\n"
        "    print('held', flush=True)\n"
        "    time.sleep(600)\n"
    )
    with holding(code, tmp_path) as holder:
        with pytest.raises(RunBusy), lock(str(tmp_path), "x", wait_seconds=0):
            pass
        os.kill(holder.pid, signal.SIGKILL)
        with lock(str(tmp_path), "x", wait_seconds=300):
            pass


def held_by_another(generation=7):
    """Write the object of a holder on another machine that never renews it."""
    holder = Holder.here().model_copy(update={"machine": "elsewhere", "host": "far"})
    storage = S3Storage("s3://locks/team/x.lock")
    storage.write(f"generation-{generation:08d}", holder.model_dump_json().encode())


def test_dead_s3_holder_is_superseded_once_it_was_silent_for_its_expiry_time(bucket):
    held_by_another()
    with pytest.raises(RunBusy), lock(bucket, "x", wait_seconds=0, expiry_seconds=0.2):
        pass
    with lock(bucket, "x", wait_seconds=300, expiry_seconds=0.2):
        assert objects() == ["x.lock/generation-00000008"]


def test_damaged_object_counts_as_a_silent_holder(bucket):
    S3Storage(f"{bucket}/x.lock").write("generation-00000007", b"{")
    with lock(bucket, "x", wait_seconds=300, expiry_seconds=0.2):
        assert objects() == ["x.lock/generation-00000008"]


def test_live_s3_holder_is_waited_for(bucket):
    held_by_another()
    with pytest.raises(RunBusy), lock(bucket, "x", wait_seconds=0.05):
        pass


@pytest.mark.slow
def test_clock_that_was_set_forward_takes_nothing_away(bucket, monkeypatch):
    now = time.time
    with lock(bucket, "x") as check:
        monkeypatch.setattr(time, "time", lambda: now() + 86_400)
        with pytest.raises(RunBusy), lock(bucket, "x", wait_seconds=0.05):
            pass
        check()


@pytest.mark.slow
def test_s3_holder_keeps_the_lock_for_longer_than_its_expiry_time(bucket):
    with lock(bucket, "x", expiry_seconds=0.8) as check:
        with pytest.raises(RunBusy), lock(bucket, "x", wait_seconds=2):
            pass
        wait_for(lambda: passes(check))


def passes(check):
    """Return whether the lock is ours; False if the thread that renews it is late."""
    with contextlib.suppress(StorageError):
        check()
        return True
    return False


class Frozen:
    """Renews nothing, as a process that was paused."""

    def __init__(self, *_, **__):
        pass

    def end(self):
        pass


@pytest.mark.slow
def test_paused_s3_holder_is_stopped_before_it_acts(bucket, monkeypatch):
    monkeypatch.setattr(leases, "Renewed", Frozen)
    with lock(bucket, "x", expiry_seconds=3600) as check:
        check()
        check.__self__._written -= 1801
        with pytest.raises(StorageError, match=r"was not renewed for .* and expires after"):
            check()
        with lock(bucket, "x", wait_seconds=300, expiry_seconds=3) as theirs:
            with pytest.raises(RunBusy, match="lock was taken over by"):
                check()
            theirs.__self__.seconds = 3600  # nothing renews it, either
            theirs()
        assert objects() == ["x.lock/generation-00000002"]
    assert objects() == ["x.lock/generation-00000002"]

"""The lease: one supervisor at a time. A dead or silent one is replaced, and fenced."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from steadytrain.components.shared.errors import BadInput, RunBusy, StorageError
from steadytrain.components.shared.lease import Generations, Holder, Renewal, hold, is_held
from steadytrain.components.shared.periodic import Pulse
from steadytrain.components.shared.storage import LocalStorage, S3Storage

from support.holding import holding
from support.s3 import mocked_s3

HOLD = """
import sys
from pathlib import Path
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.lease import hold
with hold(LocalStorage(Path(sys.argv[1])), run_id="tiny", seconds=1.0):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(params=["folder", "s3"])
def storage(request, tmp_path, monkeypatch):
    if request.param == "folder":
        yield LocalStorage(tmp_path / "lease")
        return
    with mocked_s3(monkeypatch, "runs"):
        yield S3Storage("s3://runs/tiny/lease")


@pytest.fixture
def folder(tmp_path):
    return LocalStorage(tmp_path / "lease")


@pytest.fixture
def other(folder):
    """Another process that holds the lease."""
    with holding(HOLD, folder.folder) as process:
        yield process


def own(storage, seconds=60.0):
    return hold(storage, run_id="tiny", seconds=seconds)


def elsewhere(storage, generation):
    """Write the object of a holder on another machine. Nothing else is known about the holder."""
    name = f"generation-{generation:08d}"
    content = Holder.here().model_copy(update={"machine": "elsewhere", "host": "far"})
    storage.write(name, content.model_dump_json().encode())
    return name, content


def test_each_holder_has_its_own_generation(storage):
    for generation in (1, 2, 3):
        with own(storage) as lease:
            assert lease.generation == generation
            lease.fence()
    assert storage.list() == ["generation-00000003"]


def test_lease_of_an_earlier_version_is_continued(folder):
    """As commit 71958a0 left it in a run's folder."""
    folder.write(
        "generation-00000003",
        b'{"schema_version":1,"pid":7,"host":"far","machine":"m","born":1.0,"since":"2026-01-01T00:00:00",'
        b'"renewed":9,"until":1.0,"released":true}',
    )
    with own(folder, seconds=3600) as lease:
        assert lease.generation == 4
    assert folder.list() == ["generation-00000004"]


def test_live_holder_is_named(folder, other):
    with pytest.raises(RunBusy, match=f"process {other.pid} on "), own(folder):
        pass


def test_dead_holder_is_superseded_at_once(folder, other):
    other.kill()
    other.wait()
    with own(folder, seconds=3600) as lease:
        assert lease.generation == 2


def test_process_with_a_recycled_pid_is_not_the_holder(folder):
    mine = Holder.here()
    stranger = mine.model_copy(update={"born": mine.born - 1})
    folder.write("generation-00000001", stranger.model_dump_json().encode())
    with own(folder, seconds=3600) as lease:
        assert lease.generation == 2


def test_stopped_holder_is_superseded_after_its_lease_and_fenced(folder, other, wait_for):
    other.send_signal(signal.SIGSTOP)
    try:
        wait_for(lambda: has_stopped(other.pid))
        with own(folder, seconds=1.0) as lease:
            assert lease.generation == 2
            with pytest.raises(RunBusy, match=f"taken over by process {os.getpid()}"):
                Generations(folder).fence(1)
    finally:
        other.send_signal(signal.SIGCONT)


def has_stopped(pid):
    """Return whether all threads have. The signal is on its way until each of them has run."""
    states = [
        (thread / "stat").read_text().rpartition(")")[2].split()[0]
        for thread in Path(f"/proc/{pid}/task").iterdir()
    ]
    return set(states) == {"T"}


def test_silent_remote_holder_is_superseded_by_the_observers_clock(storage):
    elsewhere(storage, 4)
    with own(storage, seconds=0.5) as lease:
        assert lease.generation == 5


def test_wait_for_a_lease_is_reported_once_with_what_it_waits_for(folder):
    folder.write("generation-00000007", b"garbage")
    told = []
    with hold(folder, run_id="tiny", seconds=0.3, notify=told.append) as lease:
        assert lease.generation == 8
    (line,) = told
    assert line.startswith("waiting up to 0.3 s, because another process may still use run 'tiny'")
    assert f"{folder.uri}/generation-00000007" in line


def test_renewing_remote_holder_is_left_alone(folder):
    name, content = elsewhere(folder, 4)
    ended = threading.Event()

    def renew():
        renewed = 0
        while not ended.wait(0.1):
            renewed += 1
            changed = content.model_copy(update={"renewed": renewed})
            folder.write(name, changed.model_dump_json().encode())

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(RunBusy, match="on far"), own(folder, seconds=600):
            pass
    finally:
        ended.set()
        thread.join()


def test_holder_renews_and_notices_a_loss(folder, wait_for):
    with own(folder, seconds=0.8) as lease:
        wait_for(lambda: Generations(folder).holder(1).renewed > 2)
        assert not lease.lost
        elsewhere(folder, 2)
        wait_for(lambda: lease.lost)
        with pytest.raises(RunBusy, match="far"):
            lease.fence()


def test_held_lease_is_reported_at_once(folder, other):
    assert is_held(folder)
    other.kill()
    other.wait()
    assert not is_held(folder)
    name, content = elsewhere(folder, 2)
    assert not is_held(folder)
    soon = content.model_copy(update={"until": time.time() + 3600})
    folder.write(name, soon.model_dump_json().encode())
    assert is_held(folder)


def ahead(folder, seconds):
    """Write the object of a remote holder whose clock is hours ahead. Return name and holder."""
    name, content = elsewhere(folder, 2)
    hours = {"until": time.time() + 6 * 3600, "seconds": seconds}
    holder = content.model_copy(update=hours)
    folder.write(name, holder.model_dump_json().encode())
    return name, holder


def test_holder_whose_clock_is_ahead_is_alive_for_one_lease(folder, wait_for):
    name, holder = ahead(folder, seconds=0.5)
    assert is_held(folder)
    wait_for(lambda: not is_held(folder))
    renewed = holder.model_copy(update={"renewed": 1})
    folder.write(name, renewed.model_dump_json().encode())
    assert is_held(folder)


def test_holder_that_wrote_long_ago_is_dead_at_the_first_look(folder):
    name, _ = ahead(folder, seconds=60.0)
    assert is_held(folder)
    long_ago = time.time() - 3600
    os.utime(folder.folder / name, (long_ago, long_ago))
    assert not is_held(folder)


def test_lease_says_how_long_it_lasts(storage):
    with own(storage, seconds=0.8) as lease:
        assert Generations(storage).holder(lease.generation).seconds == 0.8


def test_missing_lease_has_no_holder(folder):
    assert not is_held(folder)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def seen_by(clock, folder):
    """Return a lease of 1 s as an agent with this clock sees it."""
    renewal = Renewal(folder, 1, seconds=1.0)
    renewal.pulse = Pulse(clock)
    return renewal


def test_agent_gives_up_after_half_the_lease(folder, clock, wait_for):
    elsewhere(folder, 1)
    renewal = seen_by(clock, folder)
    assert not renewal.lapsed()
    clock.now = 0.6
    wait_for(renewal.lapsed)


def test_agent_gives_up_when_another_supervisor_holds_the_run(folder, clock, wait_for):
    elsewhere(folder, 1)
    renewal, silent = (seen_by(clock, folder) for _ in range(2))
    assert not renewal.lapsed()
    elsewhere(folder, 2)
    assert silent.lapsed()
    wait_for(renewal.lapsed)


def test_unreadable_storage_counts_as_silence(folder, clock, wait_for):
    class Broken(LocalStorage):
        def list(self, prefix=""):
            raise StorageError("gone")

    renewal = seen_by(clock, Broken(folder.folder))
    assert not renewal.lapsed()
    clock.now = 0.6
    wait_for(renewal.lapsed)


def test_one_of_many_concurrent_requests_gets_the_lease(folder):
    enough, answers, ready = threading.Event(), [], threading.Barrier(8)

    def told(answer):
        answers.append(answer)
        if len(answers) == 8:
            enough.set()

    def ask():
        ready.wait()
        try:
            with own(folder) as lease:
                told(lease.generation)
                assert enough.wait(600)
        except RunBusy:
            told(None)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(filter(None, answers)) == [1]


def test_number_that_was_used_and_cleared_away_is_not_the_lease(folder):
    """A process saw 1 as the last, slept while 2 came and went, and asks for 2."""
    elsewhere(folder, 1)

    class Late(LocalStorage):
        def write(self, name, content, *, if_absent=False):
            if name == "generation-00000002":
                elsewhere(folder, 3)
            return super().write(name, content, if_absent=if_absent)

    with pytest.raises(RunBusy, match="on far"), own(Late(folder.folder), seconds=0.2):
        pass
    assert "generation-00000002" not in folder.list()


@pytest.mark.parametrize("answer", [True, StorageError("no hard links")])
def test_storage_without_conditional_writes_is_rejected(folder, answer):
    class Simple(LocalStorage):
        def write(self, name, content, *, if_absent=False):
            if if_absent and isinstance(answer, StorageError):
                raise answer
            return super().write(name, content)

    with pytest.raises(BadInput, match="conditional writes"), own(Simple(folder.folder)):
        pass

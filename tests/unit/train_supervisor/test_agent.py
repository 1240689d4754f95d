"""The agent: what it receives, finds, and reports, all in the attempt's folder."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from steadytrain.components.shared.processes import host_memory, oom_kills
from steadytrain.components.train.agent.processes import processes_of
from steadytrain.components.train.attempt import AttemptResult, Beat, Exits
from steadytrain.components.train.failures import FailureClass
from steadytrain.components.train.launch import agent as agent_module
from steadytrain.components.train.launch import process as process_module
from steadytrain.components.train.recovery.outcome import conclude

from support.limited_group import limited_group

pytestmark = pytest.mark.slow

RANK = Path(__file__).with_name("rank.py")


@pytest.fixture
def agent():
    """Start an agent on its own, as a pod does."""
    started = []

    def start(folder, how, *, before=()):
        command = [sys.executable, "-m", "steadytrain.components.train.agent", "--ranks=1"]
        command += ["--threads=1", str(folder.path), sys.executable, str(RANK), how]
        environment = {**os.environ, "STEADYTRAIN_ATTEMPT": str(folder.path)}
        started.append(subprocess.Popen([*before, *command], env=environment))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def waiting(folder):
    return (folder.path / "waiting-0").exists()


def ended(attempt):
    while not attempt.poll():
        time.sleep(0.02)
    return dict(attempt.exits())


def test_agent_forwards_sigterm_and_exits_like_its_ranks(folder, agent, wait_for):
    process = agent(folder, "wait")
    wait_for(lambda: waiting(folder))
    process.terminate()
    assert process.wait(300) == 143
    assert Exits.load(folder.node(0).exits).statuses == {0: 143}
    assert AttemptResult.load(folder.result).outcome == "preempted"


@pytest.mark.parametrize(("how", "status"), [("finish", 0), ("crash", 1), ("kill", 1)])
def test_agent_reports_its_own_status(folder, agent, how, status):
    assert agent(folder, how).wait(300) == status


def test_agent_stops_its_ranks_when_the_lease_expires(make_folder, agent):
    folder = make_folder(lease_seconds=30)
    assert agent(folder, "wait").wait(300) == 143
    assert not processes_of(folder.path)


def test_stubborn_ranks_are_killed_before_another_supervisor_starts(
    make_folder, agent, held, wait_for
):
    folder = make_folder(lease_seconds=20, stop_grace_seconds=3600)
    with held(1):
        process = agent(folder, "ignore")
        wait_for(lambda: waiting(folder))
    process.wait(300)
    assert not processes_of(folder.path)
    assert Exits.load(folder.node(0).exits).statuses == {0: -signal.SIGKILL}


def test_rank_that_never_starts_is_a_hang(make_folder, launcher, monkeypatch):
    monkeypatch.setattr(process_module, "_IDLE_SECONDS", 300.0)
    made = launcher("finish")
    # The agent would have to start within the same time, so it has started before.
    with made.start(make_folder()) as attempt:
        assert ended(attempt) == {0: 0}
    made.program = (*made.program[:-1], "ignore")
    folder = make_folder(attempt=2, start_timeout_seconds=15)
    with made.start(folder) as attempt:
        exits = ended(attempt)
    failure = conclude(folder, exits, None).failure
    assert failure.failure_class is FailureClass.HANG
    assert re.search(r"rank 0 silent for \d+ s, not started", failure.message)


def test_agent_outlives_heartbeats_that_cannot_be_written(make_folder, agent, held, wait_for):
    """While it cannot write its own, it does not judge those of its ranks."""
    folder = make_folder(start_timeout_seconds=10)
    for path in (folder.node(0).heartbeat, folder.heartbeat(0)):
        path.mkdir(parents=True)
    with held(60):
        process = agent(folder, "wait")
        wait_for(lambda: waiting(folder))
        time.sleep(12)
        assert process.poll() is None
        for path in (folder.node(0).heartbeat, folder.heartbeat(0)):
            path.rmdir()
        process.wait(300)
    failure = conclude(folder, Exits.load(folder.node(0).exits).statuses, None).failure
    assert failure.failure_class is FailureClass.HANG


def test_agent_that_is_killed_is_a_lost_node(folder, launcher, wait_for):
    with launcher("wait").start(folder) as attempt:
        wait_for(lambda: waiting(folder))
        os.kill(Beat.read(folder.node(0).heartbeat).pid, signal.SIGKILL)
        assert ended(attempt) == {}
    failure = conclude(folder, {}, None).failure
    assert failure.failure_class is FailureClass.NODE_LOST
    assert not processes_of(folder.path)


def test_frozen_agent_is_a_lost_node(make_folder, launcher, held, wait_for):
    folder = make_folder(lease_seconds=20)
    with held(1), launcher("wait").start(folder) as attempt:
        wait_for(lambda: waiting(folder))
        os.kill(Beat.read(folder.node(0).heartbeat).pid, signal.SIGSTOP)
        assert ended(attempt) == {}
    assert "no sign of life" in conclude(folder, {}, None).failure.message
    assert not processes_of(folder.path)


def test_agent_that_ignores_signals_is_killed(folder, launcher, wait_for, monkeypatch):
    monkeypatch.setattr(agent_module, "_SLACK_SECONDS", 0.5)
    with launcher("wait").start(folder) as attempt:
        wait_for(lambda: waiting(folder))
        os.kill(Beat.read(folder.node(0).heartbeat).pid, signal.SIGSTOP)
        attempt.stop(0)
        assert ended(attempt) == {}
    assert not processes_of(folder.path)


def test_out_of_memory_is_reported_by_the_control_group(folder, agent):
    with limited_group() as group:
        group.limit(256 << 20)
        process = agent(folder, "allocate", before=group.inside([]))
        assert process.wait(300) == 1
    failure = conclude(folder, Exits.load(folder.node(0).exits).statuses, None).failure
    assert failure.failure_class is FailureClass.HOST_OOM
    assert not failure.unexplained
    assert "control group" in failure.message


@pytest.mark.parametrize(
    ("membership", "file"),
    [
        ("4:memory:/pods/one\n0::/", "memory/pods/one/memory.oom_control"),
        ("4:cpu,memory:/not/seen/from/here\n", "memory/memory.oom_control"),
        ("0::/pods/one\n", "pods/one/memory.events"),
        ("0::/\n", "memory.events"),
    ],
)
def test_kernel_counters_are_found(tmp_path, membership, file):
    (tmp_path / "membership").write_text(membership)
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("low 0\noom 4\noom_kill 3\noom_group_kill 0\n")
    assert oom_kills(tmp_path, tmp_path / "membership") == 3


# From Linux's Documentation/admin-guide/cgroup-v2.rst, "memory.events": a flat-keyed file, which
# exists on non-root cgroups. Its fields also count what happens further down.
SECOND_VERSION = """\
low 0
high 1173
max 88
oom {out}
oom_kill {killed}
oom_group_kill 0
sock_throttled 0
"""


def test_cgroup_v2_oom_count_is_read_as_documented(tmp_path):
    """This machine may have only version 1. The test above covers a real kill there."""
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    own = tmp_path / "kubepods.slice" / "pod1.scope"
    own.mkdir(parents=True)
    (tmp_path / "membership").write_text("0::/kubepods.slice/pod1.scope\n")
    counted = []
    for out, killed in ((0, 0), (3, 0), (3, 1), (4, 12)):
        (own / "memory.events").write_text(SECOND_VERSION.format(out=out, killed=killed))
        counted.append(oom_kills(tmp_path, tmp_path / "membership"))
    assert counted == [0, 0, 1, 12]


def test_cgroup_v2_root_has_no_oom_count(tmp_path):
    (tmp_path / "cgroup.controllers").write_text("memory\n")
    (tmp_path / "membership").write_text("0::/\n")
    assert oom_kills(tmp_path, tmp_path / "membership") == 0


@pytest.mark.parametrize(
    ("file", "membership"),
    [
        ("memory/pod1/memory.limit_in_bytes", "9:memory:/pod1\n1:cpu:/\n"),
        ("pods/pod1/memory.max", "0::/pods/pod1\n"),
        ("memory.max", "0::/\n"),
    ],
)
def test_cgroup_limit_bounds_the_memory(tmp_path, file, membership):
    (tmp_path / "membership").write_text(membership)
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("1048576\n")
    assert host_memory(tmp_path, tmp_path / "membership") == 2**20


@pytest.mark.parametrize("unlimited", ["max", "9223372036854771712"])
def test_memory_without_a_limit_is_the_machines(tmp_path, unlimited):
    (tmp_path / "membership").write_text("0::/\n")
    (tmp_path / "memory.max").write_text(f"{unlimited}\n")
    assert host_memory(tmp_path, tmp_path / "membership") == psutil.virtual_memory().total


def test_missing_counters_give_no_count(tmp_path):
    assert oom_kills(tmp_path, tmp_path / "missing") == 0

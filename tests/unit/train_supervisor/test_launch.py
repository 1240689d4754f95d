"""Launcher and agent: exits and logs by rank in the attempt's folder, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from steadytrain.components.shared.config import ComputeConfig
from steadytrain.components.train.agent.processes import alive, end_processes, processes_of
from steadytrain.components.train.agent.ranks import NodeShare, _environment
from steadytrain.components.train.attempt import AttemptResult
from steadytrain.components.train.launch import agent as agent_module
from steadytrain.components.train.launch.process import RANK_PROGRAM, ProcessLauncher

pytestmark = pytest.mark.slow

BOTH = pytest.mark.parametrize("ranks", [1, 2])


def ended(attempt):
    while not attempt.poll():
        time.sleep(0.02)
    return dict(attempt.exits())


def run(launcher, folder):
    with launcher.start(folder) as attempt:
        return ended(attempt)


def test_rank_exits_cleanly(launcher, folder):
    assert run(launcher("finish"), folder) == {0: 0}
    assert AttemptResult.load(folder.result).outcome == "finished"


@pytest.mark.parametrize(
    ("how", "status", "said"),
    [("crash", 1, "ZeroDivisionError: stand-in"), ("kill", -signal.SIGKILL, "does kill")],
)
def test_failing_rank_is_reported(launcher, folder, how, status, said):
    assert run(launcher(how), folder) == {0: status}
    assert said in folder.log(0).read_text()


def test_first_failing_rank_comes_first(launcher, folder):
    exits = run(launcher("1:kill", ranks=2), folder)
    assert next(iter(exits.items())) == (1, -signal.SIGKILL)
    assert not processes_of(folder.path)


def test_rank_that_hangs_after_a_failure_is_killed(launcher, folder):
    """The agent first asks it to exit. The root cause must still come first."""
    exits = run(launcher("1:crash_late:ignore", ranks=2), folder)
    assert list(exits.items()) == [(1, 1), (0, -signal.SIGKILL)]
    assert not processes_of(folder.path)


@BOTH
def test_stopped_ranks_exit_on_their_own(launcher, folder, ranks, wait_for):
    with launcher("wait", ranks=ranks).start(folder) as attempt:
        wait_for(lambda: len(list(folder.path.glob("waiting-*"))) == ranks)
        attempt.stop(300)
        assert set(ended(attempt).values()) == {143}
    assert AttemptResult.load(folder.result).outcome == "preempted"
    for rank in range(ranks):
        assert folder.log(rank).read_text().strip() == f"rank {rank} does wait"
    assert not folder.log(ranks).exists()


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_rank_beyond_the_grace_period_is_killed_with_its_children(
    launcher, folder, ranks, wait_for
):
    with launcher("ignore", ranks=ranks).start(folder) as attempt:
        wait_for(lambda: len(list(folder.path.glob("waiting-*"))) == ranks)
        attempt.stop(60)
        assert not attempt.poll()
        attempt.stop(0.1)
        assert any(ended(attempt).values())
    assert not processes_of(folder.path)


def test_stop_before_the_ranks_start(launcher, folder, monkeypatch):
    monkeypatch.setattr(agent_module, "_SLACK_SECONDS", 600.0)  # the agent starts within it
    with launcher("ignore", ranks=2).start(folder) as attempt:
        attempt.stop(5)
        assert any(ended(attempt).values())
    assert not processes_of(folder.path)


def test_error_in_the_supervisor_leaves_nothing_behind(launcher, folder, wait_for):
    def supervise():
        with launcher("ignore").start(folder) as attempt:
            kept.append(attempt)
            wait_for(lambda: (folder.path / "waiting-0").exists())
            raise KeyError("supervisor")

    kept = []
    with pytest.raises(KeyError):
        supervise()
    (attempt,) = kept
    assert attempt.poll()
    attempt.stop(1)
    assert not processes_of(folder.path)


def test_detached_process_is_killed_too(launcher, folder):
    assert run(launcher("orphan"), folder) == {0: 0}
    orphan = int((folder.path / "orphan").read_text())
    assert orphan not in {item.pid for item in psutil.process_iter() if alive(item)}
    assert not processes_of(folder.path)


@BOTH
def test_killed_launcher_takes_its_ranks_along(folder, ranks, wait_for):
    rank = str(Path(__file__).with_name("rank.py"))
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from steadytrain.components.shared.config import ComputeConfig\n"
        "from steadytrain.components.train.attempt import AttemptFolder\n"
        "from steadytrain.components.train.launch.process import ProcessLauncher\n"
        f"compute = ComputeConfig(nproc_per_node={ranks})\n"
        f"launcher = ProcessLauncher(compute, [sys.executable, {rank!r}, 'wait'], imports=())\n"
        f"with launcher, launcher.start(AttemptFolder(Path({str(folder.path)!r}))):\n"
        "    time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program])
    wait_for(lambda: len(list(folder.path.glob("waiting-*"))) == ranks)
    process.kill()
    process.wait()
    wait_for(lambda: not processes_of(folder.path))


def test_threads_and_ranks_come_from_the_attempt(launcher, folder, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "64")
    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    monkeypatch.setenv("OMP_NUM_THREADS", "99")
    run(launcher("tell", threads=3), folder)
    log = folder.log(0).read_text()
    assert "OMP_NUM_THREADS=3\nWORLD_SIZE=None\nMASTER_ADDR=None" in log


def test_by_default_the_ranks_share_the_cores(tmp_path):
    def threads(ranks):
        return _environment(tmp_path, NodeShare(0, 1, ranks), None)["OMP_NUM_THREADS"]

    assert threads(1) == str(len(os.sched_getaffinity(0)))
    assert threads(4096) == "1"


def test_no_secret_is_on_a_command_line(folder, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_" + "a" * 34)
    for ranks in (1, 2):
        launcher = ProcessLauncher(ComputeConfig(nproc_per_node=ranks))
        arguments = launcher._arguments(folder)
        assert "hf_" not in " ".join([*launcher.imports, *arguments])
        assert list(RANK_PROGRAM) == arguments[-3:]


def test_process_that_only_writes_there_does_not_belong_to_the_attempt(folder, tmp_path):
    for place in (tmp_path / "console.log", folder.path / "notes.log", folder.path / "log"):
        place.parent.mkdir(parents=True, exist_ok=True)
        with place.open("wb") as output:
            shell = subprocess.Popen(["sleep", "3600"], stdout=output)
        try:
            end_processes(tmp_path)
            assert shell.poll() is None
        finally:
            shell.kill()
            shell.wait()

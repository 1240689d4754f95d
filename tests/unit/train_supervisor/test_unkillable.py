"""Processes that SIGKILL does not end, because they wait in the kernel for a file server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from steadytrain.components.shared.errors import Unkillable
from steadytrain.components.train.agent import processes
from steadytrain.components.train.agent.processes import MARK, end_processes
from steadytrain.components.train.attempt import AttemptFolder
from steadytrain.components.train.failures import FailureClass
from steadytrain.components.train.launch import agent as launched
from steadytrain.components.train.recovery.outcome import conclude

from support.fuse import STUCK, UNANSWERED, mirror

pytestmark = pytest.mark.slow

__all__ = ["mirror"]

RANK = Path(__file__).with_name("rank.py")
AGENT = """
import sys
from steadytrain.components.train.agent import processes
processes.KILL_SECONDS = 1.0
from steadytrain.components.train.agent.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def stuck_file(mirror, monkeypatch):
    behind, seen = mirror
    (behind / STUCK).write_text("never read")
    monkeypatch.setenv("STUCK_FILE", str(seen / STUCK))
    monkeypatch.setenv("UNANSWERED_FILE", str(behind / UNANSWERED))
    monkeypatch.setattr(processes, "KILL_SECONDS", 1.0)
    return seen / STUCK


def waits_in_kernel(pid):
    return psutil.Process(pid).status() == psutil.STATUS_DISK_SLEEP


def test_report_has_the_state_and_the_wait_channel(stuck_file, tmp_path, wait_for):
    child = subprocess.Popen(["cat", stuck_file], env={**os.environ, MARK: str(tmp_path)})
    wait_for(Path(os.environ["UNANSWERED_FILE"]).exists)
    with pytest.raises(Unkillable, match=f"process {child.pid}, disk-sleep in request") as raised:
        end_processes(tmp_path)
    assert raised.value.pids == (child.pid,)
    assert "fuse_" in raised.value.message
    assert waits_in_kernel(child.pid)
    assert "restart the machine" in raised.value.remedy


def test_run_fails_and_starts_nothing_beside_the_rank(
    supervisor, stuck_file, workspace, wait_for, monkeypatch
):
    monkeypatch.setattr(launched, "_SLACK_SECONDS", 0.5)
    running = supervisor("stick")
    waiting = workspace.attempts / "0001/waiting-0"

    def interrupt():
        wait_for(lambda: waiting.exists() and waiting.read_text())
        os.kill(os.getpid(), signal.SIGTERM)
        # Two signals at once would be one.
        wait_for(AttemptFolder(waiting.parent).leave.exists)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(Unkillable, match="disk-sleep"):
        running.run()
    thread.join()
    assert waits_in_kernel(int(waiting.read_text()))
    (attempt,) = running.ledger.history().attempts
    assert (attempt.ended.outcome, attempt.ended.failure_class) == ("failed", "node_lost")
    assert "SIGKILL" in attempt.ended.message
    with pytest.raises(Unkillable):
        supervisor("finish").run()
    assert len(running.ledger.history().attempts) == 1


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_agent_reports_the_rank_and_ends(stuck_file, folder, held, wait_for, ranks):
    arguments = [f"--ranks={ranks}", "--nodes=1", "--node=0", str(folder.path)]
    how = "stick" if ranks == 1 else "1:stick:crash_late"
    program = [sys.executable, str(RANK), how]
    with held(60):
        agent = subprocess.Popen(
            [sys.executable, "-c", AGENT, *arguments, *program],
            env={**os.environ, MARK: str(folder.path)},
        )
        waiting = folder.path / f"waiting-{ranks - 1}"
        wait_for(lambda: waiting.exists() and waiting.read_text())
        if ranks == 1:
            folder.leave.write_text("0")
        assert agent.wait(300) == 1
    pid = int(waiting.read_text())
    assert waits_in_kernel(pid)
    exits = dict.fromkeys(range(ranks), -signal.SIGKILL)
    failure = conclude(folder, exits, None).failure
    assert failure.failure_class is FailureClass.NODE_LOST
    assert f"process {pid}, disk-sleep in request" in failure.message

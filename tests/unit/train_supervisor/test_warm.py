"""The agent of a machine: it imports once for all attempts, and is replaced if it dies."""

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
from steadytrain.components.train.agent.processes import processes_of
from steadytrain.components.train.attempt import Beat
from steadytrain.components.train.failures import FailureClass
from steadytrain.components.train.launch import process
from steadytrain.components.train.launch.process import ProcessLauncher
from steadytrain.components.train.recovery.outcome import conclude

pytestmark = pytest.mark.slow

RANK = Path(__file__).with_name("rank.py")
FORK = "COMMAND=steadytrain: agent of tiny"
"""The title of the process that the rank was forked from."""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Make a launcher that imports a module with the given code ahead of time."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(filter(None, sys.path))}")

    def make(content, how="tell"):
        (tmp_path / "ahead.py").write_text(content)
        compute = ComputeConfig(threads_per_rank=1)
        return ProcessLauncher(compute, [sys.executable, str(RANK), how], imports=["ahead"])

    return make


def run(launcher, folder):
    with launcher.start(folder) as attempt:
        while not attempt.poll():
            time.sleep(0.02)
        return dict(attempt.exits())


def test_preloaded_modules_are_imported_once(module, make_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(process, "_IDLE_SECONDS", 300.0)  # a slower agent is replaced
    imported = tmp_path / "imported"
    with module(f"open({str(imported)!r}, 'a').write('once ')") as launcher:
        folders = [make_folder(attempt=number) for number in (1, 2)]
        agents = []
        for folder in folders:
            assert run(launcher, folder) == {0: 0}
            agents.append(Beat.read(folder.node(0).heartbeat).pid)
        assert agents == [launcher._agent.pid] * 2
    assert imported.read_text() == "once "
    assert all(FORK in folder.log(0).read_text() for folder in folders)


def test_agent_that_was_killed_is_replaced(module, folder, make_folder, wait_for):
    with module("") as launcher:
        run(launcher, folder)
        psutil.Process(launcher._agent.pid).kill()
        wait_for(lambda: not launcher._agent.alive)
        assert run(launcher, make_folder(attempt=2)) == {0: 0}


def test_agent_that_dies_is_reported_with_its_signal(module, folder, wait_for):
    warning = "import sys; print('install something', file=sys.stderr); sys.stderr.flush()"
    with module(warning, "wait") as launcher, launcher.start(folder) as attempt:
        wait_for(lambda: (folder.path / "waiting-0").exists())
        psutil.Process(launcher._agent.pid).kill()
        wait_for(attempt.poll)
    failure = conclude(folder, {}, None).failure
    assert failure.failure_class is FailureClass.NODE_LOST
    assert f"exit status {-signal.SIGKILL}; its log, " in failure.message
    assert failure.message.endswith("ends with: install something")


def test_output_of_an_import_is_in_the_log(module, folder):
    with module("print('hello')") as launcher:
        assert run(launcher, folder) == {0: 0}
    assert "hello" in folder.node(0).log.read_text()


def test_no_agent_outlives_its_launcher(module, folder):
    with module("") as launcher:
        run(launcher, folder)
        agent = psutil.Process(launcher._agent.pid)
    assert not agent.is_running()


def test_failed_import_is_reported(module, folder):
    with module("import nothing_of_that_name") as launcher:
        assert run(launcher, folder) == {}
    assert "nothing_of_that_name" in folder.node(0).log.read_text()
    failure = conclude(folder, {}, None).failure
    assert failure.failure_class is FailureClass.UNKNOWN
    assert "ModuleNotFoundError" in failure.message
    assert "nothing_of_that_name" in failure.message
    assert failure.traceback.startswith("Traceback")


@pytest.mark.parametrize(
    ("code", "expected", "said"),
    [
        ("import os; print('GPU 3 is gone', flush=True); os._exit(3)", "node_lost", "status 3"),
        ("import os; os.kill(os.getpid(), 11)", "crash", "exit status -11"),
        ("import os; os.kill(os.getpid(), 9)", "node_lost", "exit status -9"),
        ("raise OSError(28, 'No space left on device')", "storage", "No space left"),
    ],
)
def test_agent_that_never_starts_is_reported_with_its_evidence(
    module, folder, code, expected, said
):
    with module(code) as launcher:
        assert run(launcher, folder) == {}
    failure = conclude(folder, {}, None).failure
    assert failure.failure_class == expected
    assert said in failure.message
    assert str(folder.node(0).log) in failure.message


def test_silent_agent_is_a_hang(module, make_folder, wait_for):
    """For example, an import waits for a file server that does not respond."""
    folder = make_folder(start_timeout_seconds=1)
    code = "import sys, time; print('importing', file=sys.stderr, flush=True); time.sleep(600)"
    with module(code) as launcher, launcher.start(folder) as attempt:
        wait_for(attempt.poll, 300)
    assert not processes_of(folder.path)
    failure = conclude(folder, {}, None).failure
    assert failure.failure_class is FailureClass.HANG
    assert "recovery.start_timeout_seconds" in failure.message
    assert str(folder.node(0).log) in failure.message


def test_ranks_are_spawned_if_the_agent_has_threads(module, folder):
    """In a fork, nothing would release a lock that the second thread holds."""
    thread = "import threading, time\nthreading.Thread(target=time.sleep, args=[600], daemon=True)"
    with module(f"{thread}.start()") as launcher:
        assert run(launcher, folder) == {0: 0}
    assert "1 other threads" in folder.node(0).log.read_text()
    assert f"COMMAND={sys.executable} {RANK} tell {folder.path}" in folder.log(0).read_text()


def test_imports_of_ranks_allow_forking(folder):
    with ProcessLauncher(ComputeConfig(), [sys.executable, str(RANK), "tell"]) as launcher:
        assert run(launcher, folder) == {0: 0}
    assert FORK in folder.log(0).read_text()


def test_ranks_have_the_settings_of_nccl(folder, monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "of-the-shell")
    compute = ComputeConfig(nccl={"NCCL_SOCKET_IFNAME": "eth7"})
    with ProcessLauncher(compute, [sys.executable, str(RANK), "tell"], imports=()) as launcher:
        assert run(launcher, folder) == {0: 0}
    assert "NCCL_SOCKET_IFNAME=eth7" in folder.log(0).read_text()


def test_stop_during_imports(module, folder):
    with module("import time; time.sleep(600)") as launcher, launcher.start(folder) as attempt:
        attempt.stop(0)
        assert not attempt.poll()
    assert not processes_of(folder.path)


def test_status_of_a_fork_survives_a_full_disk():
    code = (
        "import os\n"
        "from steadytrain.components.train.agent.forking import leave\n"
        "print('lost', end='')\n"
        "leave(7)"
    )
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=full, env=buffered)
    assert done.returncode == 7


def test_modules_are_imported_without_garbage_collection(tmp_path):
    (tmp_path / "imported.py").write_text("import gc\nassert not gc.isenabled()")
    code = (
        "import gc, sys\n"
        "from steadytrain.components.train.agent.forking import prepare\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "prepare(['imported'])\n"
        "assert gc.isenabled()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

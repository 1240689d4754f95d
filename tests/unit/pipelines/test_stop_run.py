"""`stop` signals the process that holds a run, and never any other process."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from steadytrain.components.shared.errors import RunBusy
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.lease import hold
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.workspace import Workspace
from steadytrain.pipelines.local import stop_run
from steadytrain.pipelines.runs import holder, run_lock
from steadytrain.pipelines.step_processes import StepProcesses

HOLD = """
import sys, time
from pathlib import Path
from steadytrain.pipelines.runs import run_lock
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.shared.lease import hold
with run_lock(Workspace(Path(sys.argv[1]), "tiny")):
    print("held", flush=True)
    time.sleep(600)
"""
IN_NAMESPACE = """
import os, sys
from pathlib import Path
# Ours is to be the process id that means another process outside.
Path("/proc/sys/kernel/ns_last_pid").write_text(str(int(sys.argv[2]) - 1))
child = os.fork()
if child:
    os.waitpid(child, 0)
else:
    os.execv(sys.executable, [sys.executable, "-c", sys.argv[3], sys.argv[1]])
"""
needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare"
)


@pytest.fixture
def workspace(tmp_path):
    return Workspace(tmp_path, "tiny")


@pytest.fixture
def bystander():
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def held_by(command):
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def test_holder_is_stopped(workspace):
    process = held_by([sys.executable, "-c", HOLD, str(workspace.output)])
    assert stop_run(workspace, grace_seconds=300)
    assert process.wait() == -signal.SIGTERM
    assert not stop_run(workspace, grace_seconds=300)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_run_of_another_user_is_not_stopped_and_its_owner_is_reported():
    shared = Path(tempfile.mkdtemp())
    shared.chmod(0o755)
    with contextlib.ExitStack() as held:
        held.callback(shutil.rmtree, shared)
        workspace = Workspace(shared, "tiny")
        held.enter_context(run_lock(workspace))
        child = os.fork()
        if not child:
            try:
                os.setuid(65534)
                stop_run(workspace, grace_seconds=1)
            except RunBusy as error:
                os._exit(0 if "which belongs to another user" in str(error) else 2)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@needs_namespaces
def test_process_in_another_pid_namespace_is_not_mistaken_for_the_holder(workspace, bystander):
    unshare = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c"]
    process = held_by([*unshare, IN_NAMESPACE, str(workspace.output), str(bystander.pid), HOLD])
    try:
        assert holder(workspace).pid == bystander.pid
        with pytest.raises(RunBusy, match="cannot be reached from here"):
            stop_run(workspace, grace_seconds=1)
        assert bystander.poll() is None
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("change", [{"machine": "another"}, {"born": 1.0}])
def test_process_of_another_host_or_boot_is_not_stopped(workspace, bystander, change):
    """The lock names a process on another host, or one whose process ID has been reused since."""
    with run_lock(workspace):
        (path,) = workspace.locks.iterdir()
        told = json.loads(path.read_text()) | {"pid": bystander.pid} | change
        path.write_text(json.dumps(told))
        with pytest.raises(RunBusy):
            stop_run(workspace, grace_seconds=0.1)
    assert bystander.poll() is None


@pytest.fixture
def broken(workspace):
    """The steps of a run whose configuration cannot be read, so that each ends with status 1."""
    workspace.create()
    workspace.logs.mkdir()
    processes = StepProcesses(workspace, workspace.folder / "none.yaml")
    yield processes
    processes.close()


@pytest.mark.slow
def test_run_that_another_supervisor_took_over_reports_nothing(workspace, broken):
    with hold(LocalStorage(workspace.lease), run_id="tiny", seconds=60):
        assert broken.run("train") == 1
    assert read_events(workspace.events) == []


@pytest.mark.slow
def test_step_that_died_without_an_error_message_is_reported(workspace, broken):
    assert broken.run("train") == 1
    assert [event.stage for event in read_events(workspace.events)] == ["train"]

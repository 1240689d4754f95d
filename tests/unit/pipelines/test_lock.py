"""A second process on the same run is rejected. A crash releases the lock."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading

import pytest

from steadytrain.components.shared.errors import RunBusy, StorageError
from steadytrain.components.shared.workspace import Workspace
from steadytrain.pipelines.runs import holder, run_lock

from support.disks import fill, small_file_system
from support.holding import holding

HOLD = """
import sys
from pathlib import Path
from steadytrain.pipelines.runs import run_lock
from steadytrain.components.shared.workspace import Workspace
with run_lock(Workspace(Path(sys.argv[1]), "tiny")):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def workspace(tmp_path):
    return Workspace(tmp_path, "tiny")


@pytest.fixture
def other(workspace):
    with holding(HOLD, workspace.output) as process:
        yield process


def test_missing_run_has_no_holder(workspace):
    assert holder(workspace) is None
    assert not workspace.locks.exists()


def test_second_holder_sees_who_holds_the_run_and_what_to_do(workspace, other):
    with pytest.raises(RunBusy) as caught, run_lock(workspace):
        pass
    text = str(caught.value)
    for part in (str(other.pid), socket.gethostname(), "steadytrain stop tiny", "another name"):
        assert part in text
    assert holder(workspace).pid == other.pid
    assert holder(workspace).alive()


def test_full_disk_is_a_storage_error(tmp_path):
    with small_file_system(tmp_path / "disk", "size=64k") as disk:
        workspace = Workspace(disk, "tiny")
        workspace.locks.mkdir(parents=True)
        fill(disk)
        with pytest.raises(StorageError, match="No space left"), run_lock(workspace):
            pass


def test_query_does_not_block_a_run(workspace):
    asked = threading.Event()

    def ask():
        while not asked.is_set():
            holder(workspace)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for _ in range(300):
            with run_lock(workspace):
                pass
    finally:
        asked.set()
        asking.join()


def test_name_that_cannot_be_written_is_reported(workspace):
    code = HOLD.replace("with", "import resource; resource.setrlimit(1, (0, 0))\nwith", 1)
    done = subprocess.run(
        [sys.executable, "-c", code, str(workspace.output)], capture_output=True, check=False
    )
    assert b"StorageError: cannot write" in done.stderr
    assert b"File too large" in done.stderr


@pytest.mark.parametrize("leaves", [True, False])
def test_holder_in_another_container_gets_time_to_exit(workspace, other, leaves):
    (path,) = workspace.locks.iterdir()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"machine": "another"}))
    if leaves:
        threading.Timer(0.5, other.kill).start()
        with run_lock(workspace, linger_seconds=600):
            assert holder(workspace).pid == os.getpid()
    else:
        with (
            pytest.raises(RunBusy, match=f"process {other.pid}"),
            run_lock(workspace, linger_seconds=0.5),
        ):
            pass


def test_crash_releases_the_lock(workspace, other):
    other.kill()
    other.wait()
    assert holder(workspace) is None
    with run_lock(workspace):
        assert holder(workspace).process().pid == os.getpid()
    assert holder(workspace) is None


def test_error_releases_the_lock(workspace):
    with pytest.raises(ValueError, match="inside"), run_lock(workspace):
        raise ValueError("inside")
    assert holder(workspace) is None


def test_child_keeps_a_lock_it_was_given(workspace):
    with run_lock(workspace) as descriptor:
        line = [sys.executable, "-c", "input()"]
        child = subprocess.Popen(line, stdin=subprocess.PIPE, pass_fds=[descriptor])
    try:
        with pytest.raises(RunBusy), run_lock(workspace):
            pass
    finally:
        child.communicate(b"\n")
    assert holder(workspace) is None


def test_child_does_not_inherit_the_lock(workspace):
    with run_lock(workspace):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert holder(workspace) is None
    finally:
        child.communicate(b"\n")


def test_runs_have_separate_locks(workspace):
    with run_lock(workspace):
        assert holder(Workspace(workspace.output, "other")) is None


@pytest.mark.slow
def test_holder_with_an_unreadable_name_still_holds_the_lock(workspace, other):
    for content in ("", "{", "\ufffd" * 9, '{"pid": 1}'):
        (workspace.locks / "tiny.run").write_text(content)
        assert holder(workspace).alive() is None
        with pytest.raises(RunBusy, match="an unknown host"), run_lock(workspace):
            pass

"""Steps of a local run are forked from a process that has already imported what they need."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time

import psutil
import pytest

from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import StepStarted
from steadytrain.components.shared.lifeline import Lifeline
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.agent import processes as killing
from steadytrain.components.train.agent.processes import alive
from steadytrain.pipelines import step_forks, step_processes
from steadytrain.pipelines.dag import END_NOW
from steadytrain.pipelines.step_processes import StepProcesses, died

from support.command import wait_for
from support.fuse import STUCK, mirror

pytestmark = pytest.mark.slow

__all__ = ["mirror"]

SLOW = "import time\ntime.sleep(0.2)\n"
ORIGIN = """
def train():
    import json, os, sys
    from steadytrain.components.train.launch.process import ProcessLauncher
    from steadytrain.components.shared.config import ComputeConfig
    import threading
    thread = threading.Thread(target=threading.Event().wait, daemon=True)
    thread.start()
    with ProcessLauncher(ComputeConfig()) as launcher:
        ready = launcher._template is not None and launcher._template.alive
    had = "slow_import" in sys.modules
    with open(os.environ["TOLD"], "w") as file:
        json.dump({"parent": os.getppid(), "had": had, "ready": ready}, file)
"""
HEAVY = ["torch", "transformers", "datasets", "sklearn", "kubernetes", "kfp.compiler"]
PROBE = f"""
def probe():
    import json, os, signal, sys
    from steadytrain.components.shared.lifeline import tether
    told = {{
        "pid": os.getpid(),
        "session": os.getsid(0),
        "parent": os.getppid(),
        "imported": [name for name in ["mlflow", *{HEAVY}] if name in sys.modules],
        "own": os.environ["OWN"],
        "blas": os.environ.get("OPENBLAS_NUM_THREADS"),
        "held": not tether().cut(),
        "output": os.readlink("/proc/self/fd/1"),
        "ignored": signal.getsignal(signal.SIGTERM) is signal.SIG_IGN,
    }}
    with open(os.environ["TOLD"], "w") as file:
        json.dump(told, file)
    print("said", "aloud")
"""


PIPELINE = """
import json, pathlib, signal, sys
from steadytrain.components.shared.workspace import Workspace
from steadytrain.pipelines import step_processes
from steadytrain.pipelines.dag import END_NOW
step_processes.KILL_SECONDS = 1.0
workspace = Workspace(pathlib.Path(sys.argv[1]), "tiny")
workspace.create()
processes = step_processes.StepProcesses(workspace)
signal.signal(END_NOW, lambda *_: processes.end_now())
processes.run(json.loads(sys.argv[2]))
"""


@pytest.fixture
def processes(tmp_path, monkeypatch):
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    workspace = Workspace(tmp_path, "tiny")
    workspace.create()
    made = StepProcesses(workspace)
    yield made
    made.close()


def command(source, name="probe"):
    """Return the command that KFP runs for a component without its own packages."""
    script = 'f=$(mktemp -d)/c.py; printf "%s" "$0" > "$f"; '
    script += 'python3 -m kfp.dsl.executor_main --component_module_path "$f" "$@"'
    given = ["--executor_input", json.dumps({"inputs": {}, "outputs": {"outputFile": "/dev/null"}})]
    return ["sh", "-ec", script, source, *given, "--function_to_execute", name]


def failures(processes):
    return [event.message for event in read_events(processes._workspace.events)]


def runs(pid):
    """Return whether the process runs, not counting one that init only has to reap."""
    return psutil.pid_exists(pid) and alive(psutil.Process(pid))


def test_forked_step_has_its_own_session_variables_and_output(processes, tmp_path, capfd):
    told = tmp_path / "told"
    assert processes.run(command(PROBE), {"OWN": "for it", "TOLD": str(told)}) == 0
    found = json.loads(told.read_text())
    assert found["session"] == found["pid"]
    assert found["parent"] == processes._template.pid
    assert found["imported"] == ["mlflow"]
    assert (found["own"], found["blas"], found["held"]) == ("for it", None, True)
    assert found["output"].startswith("pipe:")
    assert "said aloud" in capfd.readouterr().out


def test_step_that_is_killed_before_it_says_so_has_ended(monkeypatch, tmp_path):
    """The kernel may kill it when memory is low."""
    (tmp_path / "killed_at_once.py").write_text(
        "import socket, sys\n"
        "channel = socket.socket(fileno=int(sys.argv[1]))\n"
        "socket.recv_fds(channel, 1, 2)\n"
        "channel.sendall(b'status -9\\n')\n"
        "channel.recv(1)\n"
    )
    monkeypatch.setattr(step_forks, "_PROGRAM", "killed_at_once")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    template = step_forks.StepTemplate.start(tmp_path, ())
    try:
        with template.fork(["sh"], {}, Lifeline().descriptor) as (step, _):
            assert step is None
            assert template.status() == -9
    finally:
        template.kill()


def test_exit_status_is_that_of_a_program(processes, capfd):
    assert processes.run(command("def probe():\n    raise KeyError('this one')")) == 1
    assert "KeyError: 'this one'" in capfd.readouterr().out
    assert processes.run(command("import sys\ndef probe():\n    sys.exit(7)")) == 7
    dies = "import os\ndef probe():\n    os.kill(os.getpid(), 9)"
    assert processes.run(command(dies)) == -signal.SIGKILL
    assert "killed by SIGKILL" in failures(processes)[-1]


def test_step_whose_run_was_deleted_says_so(processes, tmp_path):
    workspace = processes._workspace
    workspace.stream("begin").emit(StepStarted(stage="begin"))
    body = f"import shutil; shutil.rmtree({str(workspace.folder)!r}); sys.exit(1)"
    assert processes.run(command(f"def dies():\n    import sys; {body}", "dies")) == 1
    (told,) = read_events(workspace.events)
    assert told.message == f"{workspace.folder} was deleted while the step ran"


def test_exit_handlers_run(processes, tmp_path):
    source = (
        "import atexit, pathlib\n"
        f"def probe():\n    atexit.register(pathlib.Path({str(tmp_path / 'left')!r}).touch)"
    )
    assert processes.run(command(source)) == 0
    assert (tmp_path / "left").exists()


def test_other_commands_are_executed_unchanged(processes, capfd):
    line = ["sh", "-c", "echo in a shell; exit 3", "--function_to_execute", "probe"]
    assert processes.run(line) == 3
    assert "in a shell" in capfd.readouterr().out


def test_leftover_processes_end_with_their_step(processes, tmp_path):
    source = (
        "import os, pathlib, time\n"
        "def probe():\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        os.setsid()\n"
        "        time.sleep(600)\n"
        f"    pathlib.Path({str(tmp_path / 'left')!r}).write_text(str(pid))"
    )
    template = processes._template.pid
    assert processes.run(command(source)) == 0
    assert not runs(int((tmp_path / "left").read_text()))
    assert processes.run(command("def probe(): pass")) == 0
    assert processes._template.pid == template


def test_leftover_that_cannot_be_killed_fails_the_step_but_blocks_no_other(
    processes, mirror, tmp_path, monkeypatch
):
    monkeypatch.setattr(killing, "KILL_SECONDS", 1.0)
    behind, seen = mirror
    (behind / STUCK).touch()
    source = (
        "import pathlib, subprocess, time\n"
        "def probe():\n"
        f"    child = subprocess.Popen(['cat', {str(seen / STUCK)!r}], stdout=-3, stderr=-3)\n"
        "    while 'request' not in pathlib.Path(f'/proc/{child.pid}/wchan').read_text():\n"
        "        time.sleep(0.02)"
    )
    assert processes.run(command(source)) == 1
    assert processes.run(command("def probe(): pass")) == 0
    (failed,) = read_events(processes._workspace.events)
    assert (failed.stage, failed.error) == ("probe", "Unkillable")
    assert "disk-sleep in request" in failed.message


def test_pipeline_ends_although_its_step_cannot_be_killed(tmp_path, mirror):
    behind, seen = mirror
    (behind / STUCK).touch()
    told = tmp_path / "pid"
    step = (
        "import os, pathlib\n"
        "def probe():\n"
        f"    pathlib.Path({str(told)!r}).write_text(str(os.getpid()))\n"
        f"    pathlib.Path({str(seen / STUCK)!r}).read_bytes()"
    )
    program = subprocess.Popen(
        [sys.executable, "-c", PIPELINE, str(tmp_path / "output"), json.dumps(command(step))]
    )
    wait_for(lambda: told.exists() and told.read_text())
    program.send_signal(END_NOW)
    assert program.wait(60) == 1


def test_template_that_is_killed_ends_its_step_and_is_replaced(processes):
    source = "import os, time\ndef probe():\n    os.kill(os.getppid(), 9)\n    time.sleep(600)"
    template = processes._template.pid
    assert processes.run(command(source)) == -signal.SIGKILL
    assert "killed by SIGKILL" in failures(processes)[-1]
    assert processes.run(command("def probe(): pass")) == 0
    assert processes._template.pid != template


def test_no_process_is_left_at_the_end(processes):
    template = processes._template.pid
    assert processes.run(command("def probe(): pass")) == 0
    processes.close()
    assert not psutil.pid_exists(template)
    with pytest.raises(ChildProcessError):
        os.waitpid(template, os.WNOHANG)


@pytest.fixture
def training(tmp_path, monkeypatch):
    """Processes of a run that trains, with one slow import in place of torch."""
    (tmp_path / "slow_import.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(step_processes, "RANK_IMPORTS", ("slow_import",))
    workspace = Workspace(tmp_path, "tiny")
    workspace.create()
    made = StepProcesses(workspace, trains=True)
    yield made
    made.close()


def origin(processes, told):
    """Run a train step. Return what it found out about where it comes from."""
    assert processes.run(command(ORIGIN, "train"), {"TOLD": str(told)}) == 0
    return json.loads(told.read_text())


def test_imports_of_training_begin_while_data_is_prepared(training, tmp_path):
    assert processes_ran(training, "preprocess")
    found = origin(training, tmp_path / "told")
    assert found == {"parent": training._heavy.pid, "had": True, "ready": True}
    assert training._heavy.pid != training._template.pid


def test_training_starts_without_the_early_imports(training, tmp_path):
    """Whatever happens to the process that has them."""
    assert processes_ran(training, "preprocess")
    os.kill(training._heavy.pid, signal.SIGKILL)
    wait_for_end(training._heavy)
    found = origin(training, tmp_path / "told")
    assert found == {"parent": training._template.pid, "had": False, "ready": False}


def test_import_that_fails_is_left_to_the_training_process(training, tmp_path):
    (tmp_path / "slow_import.py").write_text("raise OSError('not this one')")
    assert processes_ran(training, "preprocess")
    wait_for_end(training._heavy)
    assert origin(training, tmp_path / "told")["parent"] == training._template.pid


def test_early_imports_leave_no_process(training, tmp_path):
    assert processes_ran(training, "preprocess")
    heavy = training._heavy.pid
    training.close()
    assert not runs(heavy)


def processes_ran(processes, name):
    return processes.run(command(f"def {name}(): pass", name)) == 0


def wait_for_end(template):
    while template.alive:
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("status", "cause"),
    [(-signal.SIGKILL, "the kernel sends"), (-signal.SIGABRT, "without memory; the log ends")],
)
def test_cause_of_a_signal_and_the_limit_of_the_shell_are_named(monkeypatch, status, cause):
    assert "ulimit" not in died("train", status).message
    limit = (4_000_000_000, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: limit)
    message = died("train", status).message
    assert cause in message
    assert "`ulimit -v` limits its memory to 4 GB" in message

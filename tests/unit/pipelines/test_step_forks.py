"""Steps of a local run are forked from a process that has already imported what they need."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from steadytrain.components.shared.config import load
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import StepStarted
from steadytrain.components.shared.stopping import Lifeline
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.agent import processes as killing
from steadytrain.components.train.agent.fork_server import LIFELINE, ForkServer
from steadytrain.components.train.agent.processes import alive
from steadytrain.pipelines.step_processes import StepProcesses, died

from support.command import wait_for
from support.fuse import STUCK, UNANSWERED, mirror

pytestmark = pytest.mark.slow

__all__ = ["mirror"]

SLOW = "import time\ntime.sleep(0.2)\n"
ORIGIN = """
import json, os, sys, threading
from steadytrain.components.train.launch.process import ProcessLauncher
from steadytrain.components.shared.config import ComputeConfig
thread = threading.Thread(target=threading.Event().wait, daemon=True)
thread.start()
with ProcessLauncher(ComputeConfig(), agent=agent) as launcher:
    ready = agent is not None and agent.alive
had = "slow_import" in sys.modules
with open(os.environ["TOLD"], "w") as file:
    json.dump({"parent": os.getppid(), "had": had, "ready": ready}, file)
"""
HEAVY = ["torch", "transformers", "datasets", "sklearn", "kubernetes", "kfp"]
PROBE = f"""
import json, os, signal, sys
from steadytrain.components.shared.stopping import tether
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
STEPS = """
import os, pathlib
first = os.environ.get("FAILS_FIRST")
if first and not pathlib.Path(first).exists():
    pathlib.Path(first).touch()
    raise OSError("not the first time")

def perform(name, config, agent):
    exec(pathlib.Path(os.environ["SOURCE"]).read_text(), {"agent": agent})
"""
"""In place of `pipelines/steps.py`: every step runs the code in a file."""
REPLACED = """
import importlib.abc, importlib.util, os, pathlib, sys

HEAVY = ["preprocess", "train", "evaluate", "register", "report"]

class Replaced(importlib.abc.MetaPathFinder):
    def find_spec(self, name, *_):
        here = pathlib.Path(__file__).parent
        if name == "steadytrain.pipelines.steps":
            return importlib.util.spec_from_file_location(name, here / "own_steps.py")
        heavy = [f"steadytrain.components.{step}.step" for step in HEAVY]
        if "LIGHT" in os.environ and (name.partition(".")[0] == "mlflow" or name in heavy):
            return importlib.util.spec_from_file_location(
                name, here / "light.py", submodule_search_locations=[]
            )

sys.meta_path.insert(0, Replaced())
"""
LIGHT = "class HTTPAdapter: pass"
"""In place of MLflow, which takes seconds to import, and of what the steps run."""
PIPELINE = """
import pathlib, signal, sys
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.agent import processes as killing
from steadytrain.pipelines import step_processes
step_processes.KILL_SECONDS = killing.KILL_SECONDS = 1.0
workspace = Workspace(pathlib.Path(sys.argv[1]), "tiny")
processes = step_processes.StepProcesses(workspace, pathlib.Path(sys.argv[2]))
signal.signal(signal.SIGINT, lambda *_: processes.end_now())
status = processes.run("probe")
processes.close()
sys.exit(status)
"""


@pytest.fixture
def own_steps(tmp_path, monkeypatch):
    """Have every step run the code that a test gives it. Return the configuration's file."""
    (tmp_path / "own_steps.py").write_text(STEPS)
    (tmp_path / "sitecustomize.py").write_text(REPLACED)
    (tmp_path / "light.py").write_text(LIGHT)
    monkeypatch.setenv("LIGHT", "1")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("SOURCE", str(tmp_path / "source.py"))
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    Workspace(tmp_path, "tiny").create()
    Workspace(tmp_path, "tiny").logs.mkdir()
    config = tmp_path / "config.yaml"
    config.write_bytes(load("causal-lm").to_saved())
    return config


@pytest.fixture
def processes(own_steps, tmp_path):
    made = StepProcesses(Workspace(tmp_path, "tiny"), own_steps)
    yield made
    made.close()


def run(processes, source, name="probe"):
    """Run a step that consists of some code."""
    Path(os.environ["SOURCE"]).write_text(source)
    return processes.run(name)


def log(processes):
    return (processes._workspace.logs / "pipeline.log").read_text()


def failures(processes):
    return [event.message for event in read_events(processes._workspace.events)]


def runs(pid):
    """Return whether the process runs, not counting one that init only has to reap."""
    return psutil.pid_exists(pid) and alive(psutil.Process(pid))


def test_forked_step_has_its_own_session_variables_and_output(own_steps, tmp_path, monkeypatch):
    told = tmp_path / "told"
    monkeypatch.delenv("LIGHT")
    monkeypatch.setenv("OWN", "for it")
    monkeypatch.setenv("TOLD", str(told))
    processes = StepProcesses(Workspace(tmp_path, "tiny"), own_steps)
    try:
        assert run(processes, PROBE) == 0
        found = json.loads(told.read_text())
        assert found["session"] == found["pid"]
        assert found["parent"] == processes._template.pid
        assert psutil.Process(found["parent"]).cmdline()[0] == "steadytrain: steps of tiny"
        assert found["imported"] == ["mlflow"]
        assert (found["own"], found["blas"], found["held"]) == ("for it", None, True)
        assert found["output"].startswith("pipe:")
        assert "said aloud" in log(processes)
    finally:
        processes.close()


def test_step_that_is_killed_before_it_says_so_has_ended(monkeypatch, tmp_path):
    """The kernel may kill it when memory is low."""
    (tmp_path / "killed_at_once.py").write_text(
        "import socket, sys\n"
        "from steadytrain.components.train.agent.fork_server import ENDED, requests_of\n"
        "requests = requests_of(sys.argv[2])\n"
        "requests.answer(ENDED, requests.receive().number, -9)\n"
        "requests.receive()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    template = ForkServer.start("killed_at_once", environment=os.environ, output=1)
    try:
        step = template.request(
            ["train", "config"], {}, descriptors={LIFELINE: Lifeline().descriptor}
        )
        assert step.wait_for_start() is None
        assert step.wait(0) == -9
    finally:
        template.kill()


def test_exit_status_is_that_of_a_program(processes):
    assert run(processes, "raise KeyError('this one')") == 1
    assert "KeyError: 'this one'" in log(processes)
    assert run(processes, "import sys; sys.exit(7)") == 7
    assert run(processes, "import os; os.kill(os.getpid(), 9)") == -signal.SIGKILL
    assert "killed by SIGKILL" in failures(processes)[-1]


def test_step_whose_run_was_deleted_says_so(processes, tmp_path):
    workspace = processes._workspace
    workspace.stream("begin").emit(StepStarted(stage="begin"))
    source = f"import shutil, sys; shutil.rmtree({str(workspace.folder)!r}); sys.exit(1)"
    assert run(processes, source) == 1
    (told,) = read_events(workspace.events)
    assert told.message == f"{workspace.folder} was deleted while the step ran"


def test_exit_handlers_run(processes, tmp_path):
    left = tmp_path / "left"
    assert (
        run(
            processes, f"import atexit, pathlib\natexit.register(pathlib.Path({str(left)!r}).touch)"
        )
        == 0
    )
    assert left.exists()


def test_step_whose_imports_failed_before_runs_in_a_new_process(own_steps, tmp_path, monkeypatch):
    monkeypatch.setenv("FAILS_FIRST", str(tmp_path / "failed"))
    processes = StepProcesses(Workspace(tmp_path, "tiny"), own_steps)
    try:
        assert run(processes, "import sys; print(sys.argv[1:]); sys.exit(3)", "evaluate") == 3
        assert "instead of forked: not the first time" in log(processes)
        assert f"['evaluate', '{own_steps}']" in log(processes)
    finally:
        processes.close()


def test_leftover_processes_end_with_their_step(processes, tmp_path):
    source = (
        "import os, pathlib, time\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    os.setsid()\n"
        "    time.sleep(600)\n"
        f"pathlib.Path({str(tmp_path / 'left')!r}).write_text(str(pid))"
    )
    template = processes._template.pid
    assert run(processes, source) == 0
    assert not runs(int((tmp_path / "left").read_text()))
    assert run(processes, "") == 0
    assert processes._template.pid == template


def test_leftover_that_cannot_be_killed_fails_the_step_but_blocks_no_other(
    processes, mirror, monkeypatch
):
    monkeypatch.setattr(killing, "KILL_SECONDS", 5.0)
    behind, seen = mirror
    (behind / STUCK).touch()
    source = (
        "import pathlib, subprocess, time\n"
        f"child = subprocess.Popen(['cat', {str(seen / STUCK)!r}], stdout=-3, stderr=-3)\n"
        f"while not pathlib.Path({str(behind / UNANSWERED)!r}).exists():\n"
        "    time.sleep(0.02)"
    )
    assert run(processes, source) == 1
    assert run(processes, "") == 0
    (failed,) = read_events(processes._workspace.events)
    assert (failed.stage, failed.error) == ("probe", "Unkillable")
    assert "disk-sleep in request" in failed.message


def test_run_ends_although_its_step_cannot_be_killed(own_steps, tmp_path, mirror):
    behind, seen = mirror
    (behind / STUCK).touch()
    Path(os.environ["SOURCE"]).write_text(
        f"import pathlib\npathlib.Path({str(seen / STUCK)!r}).read_bytes()"
    )
    program = subprocess.Popen([sys.executable, "-c", PIPELINE, str(tmp_path), str(own_steps)])
    wait_for((behind / UNANSWERED).exists)
    program.send_signal(signal.SIGINT)
    assert program.wait(300) == 1
    (failed,) = read_events(Workspace(tmp_path, "tiny").events)
    assert (failed.error, failed.stage) == ("Unkillable", "probe")


def test_template_that_is_killed_ends_its_step_and_is_replaced(processes):
    source = "import os, time\nos.kill(os.getppid(), 9)\ntime.sleep(600)"
    template = processes._template.pid
    assert run(processes, source) == -signal.SIGKILL
    assert "killed by SIGKILL" in failures(processes)[-1]
    assert run(processes, "") == 0
    assert processes._template.pid != template


def test_no_process_is_left_at_the_end(processes):
    template = processes._template.pid
    assert run(processes, "") == 0
    processes._template.kill()
    assert not psutil.pid_exists(template)
    with pytest.raises(ChildProcessError):
        os.waitpid(template, os.WNOHANG)


@pytest.fixture
def training(own_steps, tmp_path, monkeypatch):
    """Processes of a run that trains, with one slow import in place of torch."""
    (tmp_path / "slow_import.py").write_text(SLOW)
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))
    imports = {"preprocess": ["slow_import"]}
    made = StepProcesses(Workspace(tmp_path, "tiny"), own_steps, imports=imports)
    yield made
    made.close()


def origin(processes, told):
    """Run a train step. Return what it found out about where it comes from."""
    assert run(processes, ORIGIN, "train") == 0
    return json.loads(told.read_text())


def test_imports_of_training_begin_while_data_is_prepared(training, tmp_path):
    assert run(training, "", "preprocess") == 0
    found = origin(training, tmp_path / "told")
    assert found == {"parent": training._template.pid, "had": True, "ready": True}


def test_training_starts_without_the_early_imports(training, tmp_path):
    """Whatever happens to the process that has them."""
    assert run(training, "", "preprocess") == 0
    training._template.kill()
    found = origin(training, tmp_path / "told")
    assert found == {"parent": training._template.pid, "had": False, "ready": False}


def test_import_that_fails_is_left_to_the_training_process(training, tmp_path):
    (tmp_path / "slow_import.py").write_text("raise OSError('not this one')")
    assert run(training, "", "preprocess") == 0
    found = origin(training, tmp_path / "told")
    assert found == {"parent": training._template.pid, "had": False, "ready": False}
    assert "ranks are started as new processes instead of forked: not this one" in log(training)


@pytest.mark.parametrize(("source", "status"), [("", 0), ("import sys; sys.exit(3)", 3)])
def test_end_of_a_step_does_not_wait_for_the_imports(training, tmp_path, source, status):
    """And the report does not if the step failed."""
    (tmp_path / "slow_import.py").write_text("import time\nwhile True:\n    time.sleep(0.02)")
    assert run(training, source, "preprocess") == status
    if status:
        assert run(training, "", "report") == 0


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

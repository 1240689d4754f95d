"""The command that runs a pipeline, when its processes are stopped or killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess

import pytest

from steadytrain.components.shared.errors import BadInput, Stopped
from steadytrain.components.shared.events import read_events
from steadytrain.pipelines import early_checks, local
from steadytrain.pipelines.cli import app
from steadytrain.pipelines.runs import holder


def test_third_signal_leaves_nothing_behind(make_run, monkeypatch, capfd):
    run = make_run()
    run.attempt(1, last=170, max_steps=400, outcome="stopped")
    run.workspace.config.write_text(run.config.to_yaml())

    def killed(*_, **__):
        raise Stopped(signal.SIGINT)

    monkeypatch.setattr(local, "run_locally", killed)
    arguments = ["resume", "tiny", "-o", str(run.workspace.output)]
    with pytest.raises(Stopped) as stopped:
        app(arguments, standalone_mode=False)
    assert stopped.value.code == 130
    told = capfd.readouterr().err.splitlines()
    assert told[-2:] == [
        "saved   the checkpoint of step 100 of 400",
        f"next    steadytrain resume tiny --output {run.workspace.output}",
    ]


def test_process_that_a_signal_stopped_is_named_once(make_run, monkeypatch):
    workspace = make_run().workspace
    monkeypatch.setattr(local, "_LOOK_SECONDS", 0)

    def told():
        suspended.check()
        return [item.message for item in read_events(workspace.events) if item.name == "warned"]

    def send(number):
        process.send_signal(number)
        os.waitpid(process.pid, os.WUNTRACED | os.WCONTINUED)

    suspended = local._Suspended(workspace)
    with subprocess.Popen(["sleep", "60"]) as process:
        assert told() == []
        send(signal.SIGSTOP)
        pid = process.pid
        message = f"a signal stopped process {pid} of this run; `kill -CONT {pid}` continues it"
        assert [told(), told()] == [[message]] * 2
        send(signal.SIGCONT)
        assert told() == [message]
        send(signal.SIGSTOP)
        assert told() == [message] * 2
        process.kill()


@pytest.mark.parametrize("folder", ["logs", "records", "lease", "attempts"])
def test_file_in_the_place_of_a_folder_is_named_before_anything_starts(make_run, folder):
    run = make_run()
    place = getattr(run.workspace, folder)
    shutil.rmtree(place, ignore_errors=True)
    place.write_text("mine")
    with pytest.raises(BadInput, match=f"{place} is in the place of a folder"):
        app(["resume", "tiny", "-o", str(run.workspace.output)], standalone_mode=False)
    assert place.read_text() == "mine"


@pytest.mark.parametrize("command", ["run", "resume"])
def test_stop_finds_a_command_that_still_prepares(make_run, monkeypatch, command):
    """It said "not running", and the command trained."""
    run = make_run()
    run.workspace.config.write_text(run.config.to_yaml())
    first = {"run": (local, "run_locally"), "resume": (early_checks, "check_plugins")}[command]

    def preparing(*_, **__):
        assert holder(run.workspace).pid == os.getpid()
        raise Stopped(signal.SIGTERM)

    monkeypatch.setattr(early_checks, "check_here", lambda _: [])
    monkeypatch.setattr(*first, preparing)
    named = {"run": str(run.workspace.config), "resume": "tiny"}[command]
    with pytest.raises(Stopped):
        app([command, named, "-o", str(run.workspace.output)], standalone_mode=False)
    assert holder(run.workspace) is None

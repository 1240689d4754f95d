"""A request to stop is noticed, wherever it arrives and whatever catches its exception."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.errors import Stopped
from steadytrain.components.shared.events import EventStream, read_events
from steadytrain.components.shared.events.types import StepFailed, StepStarted
from steadytrain.components.shared.stage import stage
from steadytrain.components.shared.stopping import (
    STOP_SIGNALS,
    VARIABLE,
    Lifeline,
    stop_signals,
    stoppable,
)
from steadytrain.components.shared.workspace import Workspace

from support.signals import heard

__all__ = ["heard"]

WORK = """
import contextlib, time
from steadytrain.components.shared.stopping import stoppable
with stoppable() as stopping:
    print("at work", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def config(tmp_path):
    content = {"data": {"source": ["a.txt"]}, "model": {"config": {"model_type": "llama"}}}
    return from_mapping(content | {"name": "tiny", "run": "tiny", "output": str(tmp_path)})


def child(lifeline, code=WORK):
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, VARIABLE: str(lifeline.descriptor)},
        pass_fds=[lifeline.descriptor],
    )


@pytest.mark.slow
@pytest.mark.parametrize("end", ["cut", "close"])
def test_process_ends_with_its_lifeline(end):
    lifeline = Lifeline()
    process = child(lifeline)
    assert process.stdout.readline() == "at work\n"
    getattr(lifeline, end)()  # closing it is what the kernel does when the parent dies
    assert process.wait(300) == 143


@pytest.mark.slow
def test_starting_process_does_not_begin_without_its_lifeline():
    lifeline = Lifeline()
    lifeline.cut()
    out, _ = (process := child(lifeline)).communicate(timeout=300)
    assert (out, process.returncode) == ("", 143)
    lifeline.close()


@pytest.mark.slow
def test_cut_lifeline_kills_only_running_processes():
    """A process that leaves because the lifeline was cut must still have time to clean up."""
    code = """
import signal, sys, threading, time
from steadytrain.components.shared import stopping

entered, left = threading.Event(), threading.Event()
watch = stopping.Tether.watch

def watch_late(self, act):
    def late():
        entered.set()
        left.wait()
        act()
    watch(self, late)

stopping.Tether.watch = watch_late
try:
    with stopping.stoppable() as current:
        print("at work", flush=True)
        entered.wait()
        current.check()
except SystemExit as stop:
    left.set()
    time.sleep(1)
    print("in order", stop.code, flush=True)
"""
    lifeline = Lifeline()
    process = child(lifeline, code)
    assert process.stdout.readline() == "at work\n"
    lifeline.cut()
    out, _ = process.communicate(timeout=300)
    assert (out, process.returncode) == ("in order 143\n", 0)
    lifeline.close()


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_exit_status_distinguishes_the_keyboard_from_other_signals(number):
    with pytest.raises(Stopped) as caught, stoppable():  # noqa: PT012
        os.kill(os.getpid(), number)
        time.sleep(60)
    assert caught.value.code == (130 if number in (signal.SIGINT, signal.SIGQUIT) else 143)


def test_signals_ignored_by_nohup_stay_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stoppable():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_signal_handlers_are_restored():
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with stop_signals(lambda *_: None):
        assert before != [signal.getsignal(number) for number in STOP_SIGNALS]
    assert before == [signal.getsignal(number) for number in STOP_SIGNALS]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_request_that_a_destructor_swallows_still_stops_the_step(config):
    class Careless:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)

    done = []
    with pytest.raises(Stopped), stage(config, "register") as current:  # noqa: PT012
        Careless()
        done.append("went on")
        current.check()
        done.append("registered")
    assert done == ["went on"]
    told = [event.name for event in read_events(Workspace.of(config).events)]
    assert told == ["step_started", "step_failed"]


def test_step_that_never_checks_for_stop_is_not_reported_as_finished(config):
    with pytest.raises(Stopped), stage(config, "register"):  # noqa: PT012
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        except BaseException:  # as libraries do
            pass
    told = [event.name for event in read_events(Workspace.of(config).events)]
    assert told == ["step_started", "step_failed"]


def test_request_to_stop_while_the_start_is_written_ends_the_step(config, monkeypatch):
    written = EventStream.emit

    def emit(stream, event):
        written(stream, event)
        if isinstance(event, StepStarted):
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(EventStream, "emit", emit)
    with pytest.raises(Stopped), stage(config, "evaluate"):
        pass
    events = read_events(Workspace.of(config).events)
    assert [type(event) for event in events] == [StepStarted, StepFailed]

"""The server of trials, as a driver sees it through its connection; the processes are made up."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import AttemptEnded
from steadytrain.components.train.agent.processes import MARK, processes_of
from steadytrain.components.tune.trials.connection import greeted
from steadytrain.components.tune.trials.curve import read_curve
from steadytrain.components.tune.trials.place import TrialFolder, trials_of
from steadytrain.components.tune.trials.process import report_failure
from steadytrain.components.tune.trials.server import Server
from steadytrain.components.tune.trials.slots import Slot

from support.disks import fill, small_file_system

KILL = os.kill
SLOTS = (Slot(1, ("0",)), Slot(1, ("1",)))


class Made:
    """A process of a trial, as a test has it end."""

    pid = 2**31 - 1  # no process has it

    def __init__(self, number, until, slot):
        self.number, self.until, self.slot = number, until, slot
        self.status = None

    def poll(self):
        return self.status

    def wait(self):
        pass


class Study:
    """A server in a thread, and the processes that it starts."""

    def __init__(self, folder, monkeypatch, linger=60.0):
        self.folder, self.made = folder, []
        trials_of(folder).mkdir(parents=True)
        address = folder / "socket"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(address))
        listener.listen()
        (trials_of(folder) / "server.json").write_text(json.dumps({"address": str(address)}))
        server = Server(folder, listener, SLOTS, linger)
        monkeypatch.setattr(server, "_start", self._start)
        monkeypatch.setattr(os, "kill", self._kill)
        monkeypatch.setattr(TrialFolder, "stop_seconds", 60.0)
        self.thread = threading.Thread(target=server.run, daemon=True)
        self.thread.start()

    def _start(self, trial, slot):
        self.made.append(Made(trial.number, trial.until, slot))
        return self.made[-1]

    def _kill(self, pid, number):
        assert number == signal.SIGTERM
        for process in self.made:
            process.status = 143

    def finish(self, index):
        """End a process whose trial has finished, as its files then say."""
        with contextlib.closing(
            TrialFolder(self.folder, self.made[index].number).workspace.stream("train")
        ) as events:
            events.emit(AttemptEnded(attempt=1, outcome="finished", step=8))
        self.made[index].status = 0

    def connect(self):
        found = greeted(trials_of(self.folder))
        assert found is not None
        return found


@pytest.fixture
def study(tmp_path, monkeypatch):
    made = Study(tmp_path, monkeypatch)
    yield made
    made.connect().say({"close": True})
    made.thread.join(10)


def until(condition):
    deadline = time.monotonic() + 10
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return found


def test_trials_wait_for_a_free_slot_and_get_its_devices(study):
    driver = study.connect()
    for number in (0, 1, 2):
        driver.say({"train": number, "until": 8})
    until(lambda: len(study.made) == 2)
    assert [process.slot.gpus for process in study.made] == [("0",), ("1",)]
    study.finish(1)
    assert until(lambda: driver.messages(0.1)) == [1]
    until(lambda: len(study.made) == 3)
    assert (study.made[2].number, study.made[2].slot.gpus) == (2, ("1",))


def test_trial_that_is_running_is_not_started_twice(study):
    driver = study.connect()
    for _ in range(3):
        driver.say({"train": 0, "until": 8})
    driver.say({"train": 1, "until": 8})
    until(lambda: len(study.made) == 2)
    assert [process.number for process in study.made] == [0, 1]


def test_next_driver_hears_which_trials_are_running(study):
    first = study.connect()
    assert (first.running, first.slots) == ({}, 2)
    first.say({"train": 3, "until": 8})
    until(lambda: study.made)
    second = study.connect()
    assert second.running == {3: 8}
    assert first.messages(1) is None, "the server has left the first one"
    study.finish(0)
    assert until(lambda: second.messages(0.1)) == [3]


def test_trial_without_room_on_the_cluster_waits_until_another_makes_room(study):
    driver = study.connect()
    for number in (0, 1, 2):
        driver.say({"train": number, "until": 8})
    until(lambda: len(study.made) == 2)
    fail(study.folder, 1, "PendingTimeout")
    study.made[1].status = 0
    until(lambda: len(study.made) == 3)
    assert study.made[2].number == 2, "its slot is free for another"
    time.sleep(0.1)
    assert driver.messages(0) == [], "trial 1 has not ended"
    fail(study.folder, 2, "PendingTimeout")
    study.made[2].status = 0
    time.sleep(0.1)
    assert len(study.made) == 3
    study.finish(0)
    assert until(lambda: driver.messages(0.1)) == [0]
    until(lambda: len(study.made) == 5)
    assert {process.number for process in study.made[3:]} == {1, 2}


def test_trial_without_room_fails_if_no_other_trial_trains(study):
    driver = study.connect()
    driver.say({"train": 0, "until": 8})
    until(lambda: study.made)
    fail(study.folder, 0, "PendingTimeout")
    study.made[0].status = 0
    assert until(lambda: driver.messages(0.1)) == [0]


def fail(folder, number, error):
    report_failure(TrialFolder(folder, number).workspace, error, "no node is free")


def test_trial_starts_again_if_the_others_ended_while_it_had_no_room(study):
    driver = study.connect()
    for number in (0, 1):
        driver.say({"train": number, "until": 5})
    until(lambda: len(study.made) == 2)
    study.finish(1)
    assert until(lambda: driver.messages(0.01)) == [1]
    fail(study.folder, 0, "PendingTimeout")
    study.made[0].status = 0
    alone = until(lambda: study.made[2:])
    assert [item.number for item in alone] == [0]
    alone[0].status = 0
    assert until(lambda: driver.messages(0.01)) == [0]


def test_process_that_dies_again_and_again_fails_the_trial(study):
    driver = study.connect()
    driver.say({"train": 0, "until": 8})
    for times in (1, 2, 3):
        until(lambda times=times: len(study.made) == times)
        study.made[-1].status = -9
    assert until(lambda: driver.messages(0.1)) == [0]
    assert len(study.made) == 3
    found = read_curve(TrialFolder(study.folder, 0).workspace.events).state(running=False)
    assert (found.condition, found.failure) == ("failed", "node_lost")
    assert "ended 3 times in a row without a new checkpoint or a result" in found.error


def test_trial_that_cannot_write_how_it_ended_fails_the_study(tmp_path, monkeypatch):
    """On a full disk, a trial's process ends without a trace, and so would every next one."""
    with small_file_system(tmp_path / "disk", "size=4m") as disk:
        study = Study(disk / "study", monkeypatch)
        driver = study.connect()
        driver.say({"train": 0, "until": 8})
        until(lambda: study.made)
        fill(disk)
        for times in (1, 2, 3):
            until(lambda times=times: len(study.made) == times)
            study.made[-1].status = 0
        assert until(lambda: driver.messages(0.1)) == [0]
        failure, error = driver.given_up[0]
        assert failure == "storage"
        assert "no space left on the disk of" in error
        time.sleep(0.1)
        assert len(study.made) == 3
        driver.say({"close": True})
        study.thread.join(10)


def test_trial_that_is_stopped_is_not_started_again(study):
    driver = study.connect()
    driver.say({"train": 0, "until": 8})
    until(lambda: study.made)
    driver.say({"stop": 0})
    driver.say({"stop": 7})
    assert until(lambda: driver.messages(0.1)) == [0]
    assert len(study.made) == 1


DEAF = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if sys.argv[1:]:
    # A rank, which is in a session of its own.
    subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
print("deaf", flush=True)
time.sleep(600)
"""


class DeafStudy(Study):
    """The processes of its trials are real, and ignore SIGTERM."""

    def _start(self, trial, slot):
        place = TrialFolder(self.folder, trial.number)
        place.path.mkdir(parents=True)
        log = place.path / "log"
        with log.open("ab") as output:
            command = [sys.executable, "-c", DEAF, DEAF]
            marked = os.environ | {MARK: str(place.path / "attempt")}
            process = subprocess.Popen(command, env=marked, stdout=output)
        until(lambda: log.read_text().count("deaf") == 2)
        self.made.append(process)
        return process

    def _kill(self, pid, number):
        KILL(pid, number)


def test_trial_that_ignores_the_request_to_stop_is_killed_with_its_ranks(tmp_path, monkeypatch):
    study = DeafStudy(tmp_path, monkeypatch)
    monkeypatch.setattr(TrialFolder, "stop_seconds", 0.5)
    place = TrialFolder(tmp_path, 0)
    driver = study.connect()
    driver.say({"train": 0, "until": 8})
    until(lambda: study.made)
    assert len(processes_of(place.path)) == 2

    driver.say({"stop": 0})

    assert until(lambda: driver.messages(0.1)) == [0]
    assert not processes_of(place.path)
    (warning,) = read_events(place.workspace.events)
    assert "did not stop within 0.5 s and was killed" in warning.message
    driver.say({"close": True})
    study.thread.join(10)


def test_waiting_trial_is_stopped_without_a_process(study):
    driver = study.connect()
    for number in (0, 1, 2):
        driver.say({"train": number, "until": 8})
    driver.say({"stop": 2})
    assert until(lambda: driver.messages(0.1)) == [2]


def test_without_a_driver_the_server_stops_its_trials_and_ends(tmp_path, monkeypatch):
    study = Study(tmp_path, monkeypatch, linger=0.2)
    driver = study.connect()
    driver.say({"train": 0, "until": 8})
    until(lambda: study.made)
    time.sleep(0.3)
    assert study.thread.is_alive(), "it has a driver"
    driver._socket.close()
    study.thread.join(10)
    assert study.made[0].status == 143
    assert greeted(trials_of(tmp_path)) is None

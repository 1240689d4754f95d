"""Which trials a driver starts, stops and starts again; the processes are made up."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import psutil
import pytest

from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.errors import SteadytrainError
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import AttemptEnded
from steadytrain.components.shared.lease import hold
from steadytrain.components.shared.processes import Identity
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.train.agent.processes import MARK, memory_of, processes_of
from steadytrain.components.tune.trials import local
from steadytrain.components.tune.trials.base import Slot
from steadytrain.components.tune.trials.folder import TrialFolder, driver_of, trials_of
from steadytrain.components.tune.trials.local import LocalTrials
from steadytrain.components.tune.trials.process import report_failure

from support.command import wait_for
from support.disks import fill, small_file_system

SLOTS = (Slot(threads=1, gpus=("0",)), Slot(threads=1, gpus=("1",)))


class Ranks:
    imports = ()

    def threads(self, _):
        return 1

    def slots(self, _):
        return list(SLOTS)


class Fork:
    """A process of a trial, as a test has it end."""

    pid, started, over = 2**22 + 1, True, False  # no process has this ID

    def __init__(self, arguments, environment):
        self.number, self.until = int(arguments[1]), int(arguments[2])
        self.gpu = environment["CUDA_VISIBLE_DEVICES"]

    def ended(self):
        return self.over


class Template:
    """Makes processes, or the given real ones."""

    alive, served = True, True

    def __init__(self, make=Fork):
        self.make, self.forks = make, []

    def request(self, arguments, environment, _):
        self.forks.append(self.make(arguments, environment))
        return self.forks[-1]

    def kill(self):
        self.alive = False


class Study:
    """A driver's trials, and the processes that they have."""

    def __init__(self, folder, monkeypatch, make=Fork):
        self.folder, self.template = folder, Template(make)
        monkeypatch.setattr(local.ForkServer, "start", lambda *_, **__: self.template)
        monkeypatch.setattr(os, "kill", self._kill)
        self.trials = LocalTrials(folder, 2, 60.0, Ranks())
        self.forks = self.template.forks
        self.config = from_mapping(
            {
                "name": "tiny",
                "data": {"source": ["unused"]},
                "model": {"config": {"model_type": "llama"}},
                "training": {"max_steps": 8, "eval_steps": 4},
            }
        )

    def train(self, *numbers, until=8):
        for number in numbers:
            self.trials.train(number, self.config, until)

    def running(self, *numbers):
        return [number for number in numbers if self.state(number).condition == "running"]

    def state(self, number):
        return self.trials.state(number)

    def place(self, number):
        return TrialFolder(self.folder, number)

    def finish(self, index):
        """End a process whose trial has finished, as its files then say."""
        with contextlib.closing(
            self.place(self.forks[index].number).workspace.stream("train")
        ) as events:
            events.emit(AttemptEnded(attempt=1, outcome="finished", step=8))
        self.forks[index].over = True

    def fail(self, index):
        """End a process whose pods found no node."""
        fork = self.forks[index]
        report_failure(self.place(fork.number).workspace, "PendingTimeout", "no node is free")
        fork.over = True

    def _kill(self, pid, number):
        assert number == signal.SIGTERM
        for fork in self.forks:
            fork.over = True


@pytest.fixture
def study(tmp_path, monkeypatch):
    return Study(tmp_path, monkeypatch)


@pytest.mark.slow
def test_trials_wait_for_a_free_slot_and_get_its_devices(study):
    study.train(0, 1, 2)
    assert [(fork.number, fork.gpu) for fork in study.forks] == [(0, "0"), (1, "1")]
    study.finish(1)
    assert study.running(0, 1, 2) == [0, 2]
    assert (study.forks[2].number, study.forks[2].gpu) == (2, "1")


def test_trial_that_is_running_is_not_started_twice(study):
    study.train(0, 0, 1, 0)
    assert [fork.number for fork in study.forks] == [0, 1]


def test_trial_without_room_on_the_cluster_waits_until_another_makes_room(study):
    study.train(0, 1, 2)
    study.fail(1)
    assert study.running(0, 1, 2) == [0, 1, 2], "trial 1 has not ended"
    assert study.forks[2].number == 2, "its slot is free for another"
    study.fail(2)
    assert study.running(0, 1, 2) == [0, 1, 2]
    assert len(study.forks) == 3
    study.finish(0)
    assert study.running(0, 1, 2) == [1, 2]
    assert {fork.number for fork in study.forks[3:]} == {1, 2}


def test_trial_without_room_fails_if_no_other_trial_trains(study):
    study.train(0)
    study.fail(0)
    assert study.state(0).failure == "pending_timeout"


def test_trial_starts_again_if_the_others_ended_while_it_had_no_room(study):
    study.train(0, 1)
    study.finish(1)
    assert study.running(0, 1) == [0]
    study.fail(0)
    assert study.running(0) == [0]
    assert [fork.number for fork in study.forks[2:]] == [0]
    study.forks[2].over = True
    assert study.state(0).condition == "failed"


def test_process_that_dies_again_and_again_fails_the_trial(study):
    study.train(0)
    for times in (1, 2, 3):
        assert study.running(0) == [0]
        assert len(study.forks) == times
        study.forks[-1].over = True
    found = study.state(0)
    assert (found.condition, found.failure, len(study.forks)) == ("failed", "node_lost", 3)
    assert "ended 3 times in a row without a new checkpoint or a result" in found.error


def test_trial_that_cannot_write_how_it_ended_fails_the_study(tmp_path, monkeypatch):
    """On a full disk, a trial's process ends without a trace, and so would every next one."""
    with small_file_system(tmp_path / "disk", "size=4m") as disk:
        study = Study(disk / "study", monkeypatch)
        study.train(0)
        fill(disk)
        for _ in range(3):
            assert study.running(0) == [0]
            study.forks[-1].over = True
        found = study.state(0)
        assert (found.condition, found.failure, len(study.forks)) == ("failed", "storage", 3)
        assert "no space left on the disk of" in found.error


def lose_template(study, *, served):
    """End the template before it forks the process that it was asked for."""
    study.template.alive, study.template.served = False, served
    study.forks[-1].started, study.forks[-1].over = False, True
    study.template = Template()
    study.forks = study.template.forks


def test_template_that_dies_without_a_fork_costs_the_trial_nothing(study):
    study.train(0)
    for _ in range(4):
        lose_template(study, served=True)
        assert study.running(0) == [0]
        assert len(study.forks) == 1
    study.finish(0)
    assert study.state(0).condition == "finished"


def test_templates_that_die_before_they_are_ready_are_an_error(study):
    study.train(0)
    for _ in range(2):
        lose_template(study, served=False)
        assert study.running(0) == [0]
    lose_template(study, served=False)
    with pytest.raises(SteadytrainError, match="ended 3 times before it was ready") as error:
        study.state(0)
    assert str(trials_of(study.folder) / "log") in error.value.remedy


def test_trial_that_is_stopped_is_not_started_again(study):
    study.train(0)
    study.trials.stop(7)
    study.trials.stop(0)
    assert study.state(0).condition == "new"
    assert len(study.forks) == 1


def test_waiting_trial_is_stopped_without_a_process(study):
    study.train(0, 1, 2)
    study.trials.stop(2)
    assert study.running(0, 1, 2) == [0, 1]


@pytest.fixture
def living(study):
    """Let this process hold the lease of trial 3, like one that an earlier driver started."""
    place = study.place(3)
    place.configure(study.config, 1)
    Slot(threads=2, gpus=SLOTS[1].gpus).save(place.slot)
    with hold(LocalStorage(place.workspace.lease), run_id=place.run, seconds=60):
        yield place


def test_next_driver_takes_over_the_trials_that_hold_their_lease(study, living):
    study.place(4).configure(study.config, 1)
    assert study.trials.attach() == {3}
    assert Identity.load(driver_of(study.folder)).alive()
    study.train(3, 0, 1)
    assert [(fork.number, fork.gpu) for fork in study.forks] == [(0, "0")]
    assert study.running(0, 1, 3) == [0, 1, 3]


def test_process_that_finds_the_trial_taken_costs_it_nothing(study, tmp_path):
    """The driver died when the process that it had asked for did not hold the lease yet."""
    study.train(3)
    with hold(LocalStorage(study.place(3).workspace.lease), run_id="any", seconds=60):
        study.forks[0].over = True
        for _ in range(2):
            assert study.running(3) == [3]
        assert len(study.forks) == 1
        assert study.trials._trials[3].pid == os.getpid()


DEAF = """
import os, signal, subprocess, sys, time
from pathlib import Path
from steadytrain.components.shared.lease import hold
from steadytrain.components.shared.storage import LocalStorage
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if sys.argv[1]:
    # A rank, which is in a session of its own.
    subprocess.Popen([sys.executable, "-c", sys.argv[2], "", ""], start_new_session=True)
    with hold(LocalStorage(Path(sys.argv[1])), run_id="deaf", seconds=60):
        print("deaf", flush=True)
        time.sleep(600)
print("deaf", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_trial_that_ignores_the_request_to_stop_is_killed_with_its_ranks(study, monkeypatch):
    """It is one that an earlier driver started in another slot."""
    monkeypatch.undo()
    monkeypatch.setattr(TrialFolder, "stop_seconds", 0.5)
    place = study.place(3)
    place.configure(study.config, 1)
    Slot(threads=5).save(place.slot)
    marked = os.environ | {MARK: str(place.path / "attempt")}
    with place.log.open("ab") as output:
        lease = str(place.workspace.lease.absolute())
        process = subprocess.Popen(
            [sys.executable, "-c", DEAF, lease, DEAF], env=marked, stdout=output
        )
    wait_for(lambda: place.log.read_text().count("deaf") == 2)
    assert len(processes_of(place.path)) == 2

    assert study.trials.attach() == frozenset()

    assert process.wait() == -signal.SIGKILL
    assert not processes_of(place.path)
    (warning,) = read_events(place.workspace.events)
    assert "did not stop within 0.5 s and was killed" in warning.message


def test_without_a_driver_a_trial_stops(tmp_path):
    from steadytrain.components.tune.trials.process import _Driver

    driver = _Driver(tmp_path, linger_seconds=3600)
    here = Identity.here()
    here.save(driver_of(tmp_path))
    driver._seen -= 3601
    assert not driver.gone()
    here.model_copy(update={"born": here.born + 1}).save(driver_of(tmp_path))
    assert not driver.gone()
    driver._seen -= 3601
    assert driver.gone()
    assert psutil.pid_exists(os.getpid())


def settled(kind, enough):
    """Return `memory_of` this process and what psutil adds up, once nobody changes them meanwhile.

    Each process that starts or ends elsewhere changes how many share a page.
    """
    me = psutil.Process()

    def added():
        # Other tests leave helpers of this process, such as a fork server.
        total = 0
        for one in (me, *me.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # it has just ended
                total += getattr(one.memory_full_info(), kind)
        return total

    while True:
        before, found, after = added(), memory_of(me.pid, enough=enough), added()
        if before == pytest.approx(after, rel=0.01):
            return found, before


def test_memory_counts_shared_pages_in_parts_only_where_the_whole_may_be_too_much():
    parts, expected = settled("pss", enough=1.0)
    assert parts == pytest.approx(expected, rel=0.05)
    whole, expected = settled("rss", enough=1e15)
    assert whole == pytest.approx(expected, rel=0.05)
    assert parts < whole
    assert memory_of(2**22 + 1) == 0

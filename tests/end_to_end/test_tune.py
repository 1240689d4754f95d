"""A real study whose processes are killed has the history of one that nobody disturbed.

The tests print their seed; set STEADYTRAIN_SOAK_SEED to repeat the same kills.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time

import psutil
import pytest

from steadytrain.components.shared.append_log import FileLog
from steadytrain.components.shared.config import load
from steadytrain.components.shared.events.types import Validated
from steadytrain.components.tune.driver import drive, study_folder
from steadytrain.components.tune.log import MemoryLog
from steadytrain.components.tune.study import Study
from steadytrain.components.tune.trials.folder import TrialFolder, known_data
from steadytrain.components.tune.trials.local import LocalTrials, local_trials

from support import trials as support
from support.command import TINY_LM, wait_for
from support.forked import train
from support.pause import Pause
from support.promotions import check_promotions
from support.synthetic_trials import Quiet
from support.training import Bench, events_of, weights_digest

SETS = (
    *TINY_LM,
    "compute.device=cpu",
    "compute.threads_per_rank=1",
    "recovery.backoff_seconds=0",
    "training.max_steps=8",
    "training.eval_steps=2",
    "tune.space={training.learning_rate: {low: 1e-4, high: 3e-2, log: true}, "
    "training.weight_decay: {low: 0, high: 0.3}}",
    "tune.pruner=asha",
    "tune.reduction_factor=2",
    "tune.seeds=0",
    "tune.budget.trials=4",
)


class Driver:
    """`steadytrain tune` in an output folder."""

    def __init__(self, output, *more, **environment):
        self.config = load("causal-lm", [*SETS, *more, f"output={output}"])
        self.folder = study_folder(self.config)
        self.log = self.folder / "log.jsonl"
        sets = [part for item in (*SETS, *more) for part in ("--set", item)]
        self.told = os.memfd_create("told")
        words = ["tune", "causal-lm", "--output", str(output), *sets]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "steadytrain.pipelines.cli", *words],
            env=os.environ | {"OMP_NUM_THREADS": "1", **environment},
            stdout=self.told,
            stderr=subprocess.STDOUT,
        )

    def wait(self):
        status = self.process.wait(timeout=600)
        # Not `read`: the driver writes at the position that this file has.
        return status, os.pread(self.told, 1 << 20, 0).decode()

    def ended(self):
        return self.process.poll() is not None

    def reach(self, records):
        """Wait until the log has so many records, or the driver has ended."""
        wait_for(lambda: self.ended() or len(self.records()) >= records)

    def kill(self, *, with_trials):
        """Kill the driver and, if wanted, everything that works in the study's folder."""
        self.process.send_signal(signal.SIGKILL)
        for process in support.processes(self.folder) if with_trials else ():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()

    def records(self):
        """The log without what a clock decides."""
        return [
            {key: value for key, value in record.items() if key not in ("seconds", "config")}
            for record in FileLog(self.log).read()
        ]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    driver = Driver(tmp_path_factory.mktemp("undisturbed"))
    status, out = driver.wait()
    assert status == 0, out
    return driver


def test_study_trains_pauses_promotes_and_writes_its_results(undisturbed):
    told = json.loads((undisturbed.folder / "tuning.json").read_text())
    assert told["trials"] == 4
    assert told["trials_completed"] >= 1
    kinds = [record["kind"] for record in undisturbed.records()]
    assert {"promoted", "discarded"} <= set(kinds)
    best = load(undisturbed.folder / "best.yaml")
    assert best.training.learning_rate == told["best_params"]["training.learning_rate"]
    assert not support.processes(undisturbed.folder)


def test_log_that_lost_its_last_records_is_written_again_without_training(undisturbed, tmp_path):
    before, content = undisturbed.records(), undisturbed.log.read_bytes()
    lines = content.splitlines(keepends=True)
    kept = len(content) - sum(map(len, lines[-3:]))
    torn = tmp_path / "log"
    for end in range(kept, len(content)):
        torn.write_bytes(content[:end])
        assert FileLog(torn).read() == FileLog(undisturbed.log).read()[: end_of(lines, end)]
    undisturbed.log.write_bytes(content[: kept + 9])
    status, out = Driver(undisturbed.folder.parents[1]).wait()
    assert status == 0, out
    assert undisturbed.records() == before
    assert not [*undisturbed.folder.glob("trials/*/config.yaml")]


def end_of(lines, end):
    """Return how many lines are whole in so many bytes; the end of a line may be missing."""
    ends = itertools.accumulate(map(len, lines))
    return sum(whole - 1 <= end for whole in ends)


def kill_driver(driver):
    driver.kill(with_trials=False)


def kill_driver_and_trials(driver):
    driver.kill(with_trials=True)


def kill_rank(driver):
    support.kill(support.ranks(driver.folder)[:1])


KILLS = [kill_driver, kill_driver_and_trials, kill_rank]


def disturb(output, moments, chance, *more):
    """Kill something of a study at each of some random moments, then let it end.

    Args:
        moments: how many. Those that come after the end of the study do not count.

    Returns:
        The last driver, and how many moments counted.
    """
    driver, count, known = Driver(output, *more), 0, 0
    while count < moments:
        # Counted in records, so that a slow machine makes progress between two kills, too.
        driver.reach(known + chance.randint(0, 4))
        time.sleep(chance.uniform(0.0, 3.0))
        if driver.ended():
            break
        known = len(driver.records())
        kill, count = chance.choice(KILLS), count + 1
        print(f"{kill.__name__} after {known} records")
        kill(driver)
        if kill is not kill_rank:
            driver = Driver(output, *more)
    status, out = driver.wait()
    assert status == 0, out
    assert not support.processes(driver.folder)
    return driver, count


def seeded(otherwise=None):
    """Return a random generator whose seed is printed."""
    seed = os.environ.get("STEADYTRAIN_SOAK_SEED", otherwise) or random.randrange(10**6)
    print(f"STEADYTRAIN_SOAK_SEED={seed}")
    return random.Random(int(seed))


def check_as_undisturbed(driver, undisturbed):
    assert driver.records() == undisturbed.records()


def check_legal(driver, undisturbed):
    """Check what holds of every study, however many trials train at once."""
    log = FileLog(driver.log).read()
    study = Study(driver.config, MemoryLog(log))
    budget, started = study.tune.budget, [item for item in log if item["kind"] == "started"]
    assert [item["number"] for item in started] == [*range(len(started))]
    assert not study.running
    assert study.steps <= budget.steps
    for trial in study.history.trials:
        steps = [step for step, _ in trial.curve]
        assert steps == [*range(2, trial.reached + 1, 2)], "each validation counts once"
    check_promotions(log, study, budget.parallel)


def test_killed_driver_changes_nothing(undisturbed, tmp_path):
    driver, _ = disturb(tmp_path, 2, seeded(1))
    check_as_undisturbed(driver, undisturbed)


TOGETHER = ("tune.budget.parallel=2", "tune.budget.trials=6", "tune.budget.steps=20")


@pytest.mark.long
def test_killed_driver_of_two_trials_at_once_repeats_nothing(tmp_path):
    driver, _ = disturb(tmp_path, 2, seeded(), *TOGETHER)
    check_legal(driver, None)


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    ("more", "check"), [((), check_as_undisturbed), (TOGETHER, check_legal)], ids=["one", "two"]
)
def test_study_survives_20_kills(undisturbed, tmp_path, more, check):
    chance, kills = seeded(), 0
    while kills < 20:
        driver, count = disturb(tmp_path / str(kills), 20 - kills, chance, *more)
        check(driver, undisturbed)
        kills += count


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_promoted_trials_are_the_runs_that_were_never_paused(tmp_path):
    """Of thirty trials, every second one continues at each rung; two train at once."""
    more = ("tune.budget.trials=30", "tune.budget.parallel=2", f"output={tmp_path}")
    config = load("causal-lm", [*SETS, *more])
    study, digests = Study(config, MemoryLog()), {}
    trials = local_trials(study_folder(config), parallel=2)

    def discard(number):
        workspace = TrialFolder(trials.study, number).workspace
        if workspace.model.exists():
            digests[number] = weights_digest(workspace)
        LocalTrials.discard(trials, number)

    trials.discard = discard

    drive(study, trials, Quiet(), lambda: None)
    promoted = [trial for trial in study.history.trials if trial.reached > 2]
    assert len(promoted) >= 15
    assert len(digests) >= 7
    for trial in promoted:
        alone = undivided(study, trial, tmp_path / str(trial.number))
        curve = [(event.step, event.metrics) for event in events_of(alone, Validated)]
        assert curve[: len(trial.curve)] == trial.curve
        if trial.number in digests:
            assert weights_digest(alone) == digests[trial.number]


def undivided(study, trial, output):
    """Train a trial's configuration without a pause, on the study's data."""
    config = study.trial_config(trial.params)
    data = known_data(study_folder(study.config), config)
    alone = config.model_copy(update={"output": str(output), "run": "alone"})
    bench = Bench(output, data, alone)
    assert train(bench).outcome == "finished"
    return bench.workspace


def test_ctrl_c_stops_cleanly_and_says_how_to_continue(undisturbed, tmp_path):
    # A trial that is promoted waits there, so the study does not end before.
    pause = Pause(tmp_path / "pause", 4, "Validated", stoppable=True)
    driver = Driver(tmp_path / "output", **pause.everywhere)
    wait_for(lambda: driver.ended() or pause.pid())
    driver.process.send_signal(signal.SIGINT)
    status, out = driver.wait()
    assert status == 130, out
    assert "the same command continues the study" in out
    assert not support.processes(driver.folder)

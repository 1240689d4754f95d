"""A real study whose driver is killed, alone or with its trials, has the history of another one."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time

import psutil
import pytest

from steadytrain.components.shared.config import load
from steadytrain.components.tune.driver import study_folder
from steadytrain.components.tune.log import FileLog

from support import trials as support
from support.command import TINY_LM

SETS = (
    *TINY_LM,
    "compute.device=cpu",
    "compute.threads_per_rank=1",
    "recovery.lease_seconds=10",
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

    def __init__(self, output):
        self.folder = study_folder(load("causal-lm", [*SETS, f"output={output}"]))
        self.log = self.folder / "log.jsonl"
        sets = [part for item in SETS for part in ("--set", item)]
        words = ["tune", "causal-lm", "--output", str(output), *sets]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "steadytrain.pipelines.cli", *words],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait(self):
        out, _ = self.process.communicate(timeout=600)
        return self.process.returncode, out

    def kill(self, *, with_trials):
        """Kill the driver and, if wanted, everything that works in the study's folder."""
        self.process.send_signal(signal.SIGKILL)
        for process in support.processes(self.folder) if with_trials else ():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()

    def records(self):
        """The log without what a clock decides."""
        records = FileLog(self.log).read()
        return [
            {key: value for key, value in record.items() if key not in ("seconds", "config")}
            for record in records
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


def check_killed(moments, output, undisturbed, seed):
    """Kill a study's driver at so many moments, then let it end and compare its history."""
    chance = random.Random(seed)
    for _ in range(moments):
        driver = Driver(output)
        time.sleep(chance.uniform(2.0, 12.0))
        driver.kill(with_trials=chance.random() < 0.5)
    driver = Driver(output)
    status, out = driver.wait()
    assert status == 0, out
    assert driver.records() == undisturbed.records()
    assert not support.processes(driver.folder)


def test_killed_driver_changes_nothing(undisturbed, tmp_path):
    check_killed(2, tmp_path, undisturbed, seed=1)


@pytest.mark.soak
def test_driver_killed_at_20_moments_changes_nothing(undisturbed, tmp_path):
    for seed in range(5):
        check_killed(4, tmp_path / str(seed), undisturbed, seed=seed)


def test_ctrl_c_stops_cleanly_and_says_how_to_continue(undisturbed, tmp_path):
    driver = Driver(tmp_path)
    while not driver.log.exists() or len(driver.records()) < 3:
        time.sleep(0.1)
    driver.process.send_signal(signal.SIGINT)
    status, out = driver.wait()
    assert status == 130, out
    assert "the same command continues the study" in out
    assert not support.processes(driver.folder)

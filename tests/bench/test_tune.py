"""What a study costs beyond training: the start and end of each trial, and a killed driver.

Run with `pytest -m bench tests/bench/test_tune.py -s` on an idle machine.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from steadytrain.components.shared.events.types import (
    CheckpointSaved,
    TrainingStarted,
    TrainingStep,
)
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.tune.trials.folder import TrialFolder, known_data
from steadytrain.components.tune.trials.local import local_trials

from support import trials as support
from support.command import wait_for
from support.training import Bench, events_of, language_rows, write_data

pytestmark = pytest.mark.bench
ROUNDS = int(os.environ.get("STEADYTRAIN_BENCH_ROUNDS", "5"))
RECIPE = {
    "max_steps": 400,
    "global_batch_size": 4,
    "micro_batch_size": 2,
    "learning_rate": 5e-3,
    "eval_steps": 20,
    "save_steps": 400,
    "logging_steps": 1,
}
ALONE = """
import sys
from steadytrain.components.shared.config import load
from steadytrain.components.train.step import run
run(load(sys.argv[1]), until=20)
"""
TESTS = Path(__file__).parents[1]


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{TESTS}:{os.environ.get('PYTHONPATH', '')}")
    data = write_data(tmp_path / "data", language_rows(60), language_rows(8, seed=1))

    def make(task="causal_lm"):
        found = Bench.make(
            tmp_path / "recipe",
            data.model_copy(update={"task": task}),
            training=RECIPE,
            compute={"device": "cpu", "threads_per_rank": 1},
        )
        support.share_data(tmp_path / "study", found.config, found.data)
        return found.config

    return make


def training_seconds(workspace):
    """Return how long a run's ranks trained, validated and saved, over all of its cuts."""
    saved = events_of(workspace, CheckpointSaved)
    return sum(
        max(event.time for event in saved if event.attempt == begun.attempt) - begun.time
        for begun in events_of(workspace, TrainingStarted)
    )


def test_overhead_of_a_trial(bench, tmp_path):
    """The peer is a new program for each trial. Ignore the first trial: the template imports."""
    config, study = bench(), tmp_path / "study"
    trials = local_trials(study)
    trials.attach()
    ours, peers = [], []

    def overhead(workspace, work):
        began = time.time()
        work()
        return time.time() - began - training_seconds(workspace)

    for number in range(ROUNDS + 1):

        def promoted(number=number):
            trials.train(number, config, 20)
            assert support.ended(trials, number).step == 20

        ours.append(overhead(TrialFolder(study, number).workspace, promoted))
        alone = config.model_copy(update={"run": f"alone-{number}"})
        workspace = Workspace.of(alone)
        workspace.create()
        workspace.config.write_text(alone.to_yaml())
        known_data(study, config).save(workspace.record("preprocess"))
        command = [sys.executable, "-c", ALONE, str(workspace.config)]
        peers.append(overhead(workspace, partial(subprocess.run, command, check=True)))
    trials.close()
    for name, found in (("a trial", ours[1:]), ("a new program", peers[1:])):
        print(
            f"\n{name}: {statistics.median(found):.2f} s beyond training "
            f"({min(found):.2f} to {max(found):.2f} s)"
        )
    ratios = [mine / theirs for mine, theirs in zip(ours[1:], peers[1:], strict=True)]
    print(f"ratio {statistics.median(ratios):.2f}; the first trial: {ours[0]:.2f} s")
    assert max(ratios) < 1


def test_time_that_a_killed_driver_costs(bench, tmp_path):
    """The next driver starts at once. The trial must not lose a step meanwhile."""
    config, study = bench("support.faults:Slow"), tmp_path / "study"
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml())
    lost = []
    program = support.drive(study, path, 400, [0])
    for round_ in range(ROUNDS):
        done = round_ * 40 + 5
        wait_for(lambda done=done: max(support.steps(study, 0), default=0) >= done)
        program.kill()
        program.wait()
        killed = time.time()
        program = support.drive(study, path, 400, [0])
        lost.append(time.time() - killed)
    program.kill()
    program.wait()
    trials = local_trials(study, parallel=2)
    assert trials.attach() == {0}
    trials.close()
    steps = [event.step for event in events_of(TrialFolder(study, 0).workspace, TrainingStep)]
    assert steps == [*range(1, len(steps) + 1)]
    print(
        f"\nfrom the death of a driver until the next one has its trials: "
        f"{statistics.median(lost):.2f} s ({min(lost):.2f} to {max(lost):.2f} s); no step was lost"
    )

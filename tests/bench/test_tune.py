"""What a study costs beyond training: the start and end of each trial, and a killed driver.

Run with `pytest -m bench tests/bench/test_tune.py -s` on an idle machine.
"""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path

import pytest

from steadytrain.components.shared.events.types import (
    CheckpointSaved,
    TrainingStarted,
    TrainingStep,
)
from steadytrain.components.tune.trials.local import local_trials
from steadytrain.components.tune.trials.place import TrialFolder

from support import trials as support
from support.training import Bench, events_of, language_rows, write_data

pytestmark = pytest.mark.bench
ROUNDS = int(os.environ.get("STEADYTRAIN_BENCH_ROUNDS", "5"))
MOST_OVERHEAD_SECONDS, MOST_LOST_SECONDS = 1.0, 5.0
RECIPE = {
    "max_steps": 400,
    "global_batch_size": 4,
    "micro_batch_size": 2,
    "learning_rate": 5e-3,
    "eval_steps": 20,
    "save_steps": 400,
    "logging_steps": 1,
}
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


def training_seconds(study, number):
    """Return how long a trial's ranks trained, validated and saved, over all of its cuts."""
    workspace = TrialFolder(study, number).workspace
    begun = [event.time for event in events_of(workspace, TrainingStarted)]
    saved = [event.time for event in events_of(workspace, CheckpointSaved)]
    return sum(
        max(end for end in saved if end < (begun[place + 1] if begun[place + 1 :] else end + 1))
        - start
        for place, start in enumerate(begun)
    )


def test_the_overhead_of_a_trial(bench, tmp_path):
    """Ignore the first trial: while it starts, the server imports."""
    config, study = bench(), tmp_path / "study"
    trials = local_trials(study)
    trials.attach()
    overheads = []
    for number in range(ROUNDS + 1):
        for until in (20, 40):
            before = training_seconds(study, number)
            began = time.time()
            trials.train(number, config, until)
            assert support.ended(trials, number).step == until
            seconds = time.time() - began
            overheads.append(seconds - (training_seconds(study, number) - before))
    trials.close()
    first, later = overheads[0], overheads[2:]
    print(
        f"\noverhead of a trial's process: {statistics.median(later):.2f} s "
        f"({min(later):.2f} to {max(later):.2f} s); of the first one: {first:.2f} s"
    )
    assert statistics.median(later) < MOST_OVERHEAD_SECONDS


def test_the_time_that_a_killed_driver_costs(bench, tmp_path):
    """The next driver starts at once. The trial must not lose a step meanwhile."""
    config, study = bench("support.faults:Slow"), tmp_path / "study"
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml())
    lost = []
    program = support.drive(study, path, 400, [0])
    for round_ in range(ROUNDS):
        done = round_ * 40 + 5
        support.wait_until(lambda done=done: max(support.steps(study, 0), default=0) >= done)
        program.kill()
        program.wait()
        killed = time.time()
        program = support.drive(study, path, 400, [0])
        lost.append(time.time() - killed)
    program.kill()
    program.wait()
    trials = local_trials(study)
    assert trials.attach() == {0}
    trials.close()
    steps = [event.step for event in events_of(TrialFolder(study, 0).workspace, TrainingStep)]
    assert steps == [*range(1, len(steps) + 1)]
    print(
        f"\nfrom the death of a driver until the next one has its trials: "
        f"{statistics.median(lost):.2f} s ({min(lost):.2f} to {max(lost):.2f} s); no step was lost"
    )
    assert statistics.median(lost) < MOST_LOST_SECONDS

"""The cost of a start: repeating a finished run, and reaching the first step of a tiny model.

Run with `pytest -m bench tests/bench/test_start.py -s` on an idle machine.
"""

from __future__ import annotations

import os
import resource
import statistics
import time

import pytest

from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import StepFinished, TrainingStep

from support.command import TINY_LM, Command

pytestmark = pytest.mark.bench
ROUNDS = int(os.environ.get("STEADYTRAIN_BENCH_ROUNDS", "5"))
MOST_CPU_SECONDS, MOST_SECONDS_TO_A_STEP = 8.0, 30.0


def cpu_seconds() -> float:
    """Return the CPU seconds of all child processes that have ended, and of their children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_time_of_a_repeated_run_and_to_the_first_step(tmp_path_factory):
    """Ignore the first round, because its caches are cold."""
    first, repeated, wall = [], [], []
    for number in range(ROUNDS + 1):
        command = Command(tmp_path_factory.mktemp(f"round-{number}") / "output")
        began = time.time()
        done = command.run("causal-lm", *TINY_LM)
        assert done.code == 0, done.out
        (folder,) = done.runs
        steps = [item for item in read_events(folder / "events") if isinstance(item, TrainingStep)]
        first.append(steps[0].time - began)

        before, began = cpu_seconds(), time.time()
        assert command.run("causal-lm", *TINY_LM).code == 0
        repeated.append(cpu_seconds() - before)
        wall.append(time.time() - began)
        told = read_events(folder / "events")
        again = [item for item in told if item.time > began]
        assert not any(isinstance(item, TrainingStep) for item in again)
        assert {item.stage for item in again if isinstance(item, StepFinished) and item.reused}
    cost, way = statistics.median(repeated[1:]), statistics.median(first[1:])
    print(
        f"\nrepeating a finished run: {cost:.2f} s of CPU time, "
        f"{statistics.median(wall[1:]):.2f} s; to the first step: {way:.2f} s"
    )
    assert cost < MOST_CPU_SECONDS
    assert way < MOST_SECONDS_TO_A_STEP

"""The reported time of a step's phases, and that ranks wait for each other."""

from __future__ import annotations

import statistics
import time

import pytest
import torch

from steadytrain.components.shared.events.types import TrainingStep
from steadytrain.components.tasks.causal_lm import SupervisedFineTuning
from steadytrain.components.train.strategy.base import Timer

from support.benches import make_bench
from support.slowed import steps_with_a_slow_rank
from support.training import events_of

__all__ = ["make_bench"]


def test_spans_add_up_and_are_taken_once(monkeypatch):
    clock = iter([10.0, 13.0, 20.0, 20.5, 30.0, 31.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    waits = Timer(torch.device("cpu"))
    with waits:
        pass
    waits.begin()
    waits.end()
    assert waits.take() == 3.5
    assert waits.take() == 0.0
    with waits:
        pass
    assert waits.take() == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("slow", ["compute_loss", "collate"])
def test_late_rank_makes_the_other_wait(tmp_path, slow):
    steps = steps_with_a_slow_rank(tmp_path, "ddp", slow)
    # One of the two waits for most of each step. The late one does not wait. In a single step, a
    # busy machine may hold up the other one for longer.
    assert 0.3 < statistics.median(step.communication_wait for step in steps) < 0.7
    assert statistics.mode(step.slowest_rank for step in steps) == 1
    assert all(step.slowest_rank_wait < step.communication_wait for step in steps)


@pytest.mark.slow
def test_no_waiting_share_is_reported_if_ranks_synchronize_throughout_a_step(tmp_path):
    steps = steps_with_a_slow_rank(tmp_path, "fsdp", "compute_loss")
    assert {step.communication_wait for step in steps} == {None}
    assert {step.slowest_rank for step in steps} == {None}


def test_single_rank_waits_for_nobody(make_bench):
    bench = make_bench()
    bench.train_here()
    assert {step.communication_wait for step in events_of(bench.workspace, TrainingStep)} == {None}


@pytest.mark.slow
def test_phases_of_a_step_are_measured_separately_and_fit_into_it(make_bench, monkeypatch):
    prompt = SupervisedFineTuning.compute_loss

    def late(*given):
        # Far more than the rest of a step takes, also on a busy machine.
        time.sleep(1.5)
        return prompt(*given)

    def measured(name):
        bench = make_bench(name, training={"logging_steps": 6})
        bench.train_here()
        return events_of(bench.workspace, TrainingStep)[0]

    usual = measured("usual")
    assert min(usual.forward, usual.backward, usual.optimizer) > 0
    assert usual.forward + usual.backward + usual.optimizer < 1.01
    monkeypatch.setattr(SupervisedFineTuning, "compute_loss", late)
    slow = measured("slow")
    assert slow.forward > slow.backward + slow.optimizer

"""The winner's runs on fresh seeds: which one goes through the gate, and what the card says."""

from __future__ import annotations

import pytest

from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.records import TrainRecord
from steadytrain.components.tune.trials.retrain import best_seed, on_seed


@pytest.fixture
def best():
    return from_mapping(
        {
            "name": "tiny",
            "run": "trial-7",
            "data": {"source": ["unused"]},
            "model": {"config": {"model_type": "llama"}},
        }
    )


def trained(score):
    return TrainRecord(
        outcome="finished",
        model="/m",
        weights_digest="",
        metric="loss",
        best_score=score,
        best_step=1,
        steps=1,
        attempts=1,
        parameters=1,
        seconds=1.0,
    )


def test_each_seed_is_a_run_of_its_own_that_says_how_many_were_compared(best):
    runs = [on_seed(best, seed, 40) for seed in (1, 2)]
    assert [run.training.seed for run in runs] == [1, 2]
    assert [run.gate.compared for run in runs] == [40, 40]
    assert len({best.run_id, *(run.run_id for run in runs)}) == 3


@pytest.mark.parametrize(("greater", "seed"), [(True, 2), (False, 3)])
def test_the_best_by_validation_is_chosen(greater, seed):
    scores = {1: trained(0.5), 2: trained(0.7), 3: trained(0.2), 4: trained(0.7)}
    assert best_seed(scores, greater_is_better=greater) == seed

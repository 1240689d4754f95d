"""The winner's runs on fresh seeds: which one goes through the gate, and what the card says."""

from __future__ import annotations

import shutil

import pytest

from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.errors import TrainingFailed
from steadytrain.components.shared.records import GateRecord, TrainRecord
from steadytrain.components.shared.registry import Registry
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.tune.trials import retrain as module
from steadytrain.components.tune.trials.retrain import best_seed, on_seed, retrain

from support.evaluating import make_config, train
from support.stores import empty_store

__all__ = ["empty_store"]


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
def test_best_by_validation_is_chosen(greater, seed):
    scores = {1: trained(0.5), 2: trained(0.7), 3: trained(0.2), 4: trained(0.7)}
    assert best_seed(scores, greater_is_better=greater) == seed


@pytest.fixture
def winner(tmp_path, empty_store, monkeypatch):
    """Return a winner, and a function that says what training on each seed gives.

    A seed has a skill on the test side and a score on the validation side; None means it fails.
    """
    config = make_config(tmp_path / "output", "winner")
    store = Workspace.of(config).tracking_store
    store.parent.mkdir()
    shutil.copyfile(empty_store, store)

    def learns(seeds):
        def trained(config):
            found = seeds[config.training.seed]
            if found is None:
                raise TrainingFailed("it diverged", failure_class="divergence")
            skill, score = found
            Workspace.of(config).create()
            train(config, skill)
            path = Workspace.of(config).record("train")
            record = TrainRecord.load(path).model_copy(update={"best_score": score})
            record.save(path)
            return record

        monkeypatch.setattr(module, "_train", trained)

    return config, learns


@pytest.mark.slow
def test_best_seed_goes_through_the_gate_and_the_card_says_how_many_were_compared(winner):
    config, learns = winner
    learns({1: (0.9, 0.3), 2: (0.8, 0.2), 3: None})
    found = retrain(config, [1, 2, 3], compared=1200, greater_is_better=False)
    assert found.config.training.seed == 2, "the best by validation, not by the test side"
    assert found.trained.keys() == {1, 2}
    assert found.registration.champion
    assert found.gate == GateRecord.load(Workspace.of(found.config).record("gate"))
    assert found.gate.compared == 1200
    registry = Registry(found.config, Workspace.of(found.config))
    (version,) = registry.tracking.client.search_model_versions("name = 'shapes'")
    assert "best of 1,200 that were compared" in version.description
    losers = Workspace.of(on_seed(config, 1, 1200))
    assert not losers.record("evaluate").exists(), "the test side was opened for one model"


def test_winner_that_fails_on_every_seed_is_an_error(winner):
    config, learns = winner
    learns({1: None, 2: None})
    with pytest.raises(TrainingFailed, match="it diverged"):
        retrain(config, [1, 2], compared=2, greater_is_better=False)

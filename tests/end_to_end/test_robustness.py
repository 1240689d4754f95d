"""Regularized and robust classifiers in full runs: killed and resumed, and on two ranks."""

from __future__ import annotations

import pytest

from support import selected
from support.forked import ForkedLauncher, train
from support.training import (
    GPT2,
    TEXTS,
    Bench,
    class_rows,
    language_rows,
    losses_of,
    weights_digest,
    with_texts,
    write_data,
)
from support.weight_digests import BERT, RECIPE, KillsOnce

MODEL = {"config": BERT, "dropout": {"hidden": 0.2, "attention": 0.1, "classifier": 0.3}}
STILL = {"config": BERT, "dropout": {"hidden": 0.0, "attention": 0.0, "classifier": 0.0}}
CHANGES = {"deletion": 0.2, "swap": 0.2, "character_noise": 0.1}
TRAINING = {
    "r_drop": {
        "r_drop": {"weight": 1.0},
        "focal_loss": {"gamma": 2.0},
        "class_weights": {"kind": "given", "given": {"a": 1, "b": 2, "c": 0.5}},
        "order": "balanced",
    },
    "fgm": {"adversarial": {"kind": "fgm"}},
    "pgd": {"adversarial": {"kind": "pgd", "steps": 2}},
    "freelb": {"adversarial": {"kind": "freelb", "norm": "linf", "epsilon": 0.05}},
    "augmentation": {"augmentation": CHANGES},
    "mixup": {
        "mixup": {"alpha": 0.4},
        "augmentation": CHANGES,
        "r_drop": {"weight": 1.0},
        "focal_loss": {"gamma": 2.0},
        "label_smoothing_factor": 0.1,
        "class_weights": {"kind": "given", "given": {"a": 1, "b": 2, "c": 0.5}},
    },
    "mixup, attacked": {"mixup": {"alpha": 1.0}, "adversarial": {"kind": "pgd", "steps": 2}},
}
"""The fields of `training`, by the technique that they show."""


@pytest.fixture(scope="module")
def classified(tmp_path_factory):
    return write_data(
        tmp_path_factory.mktemp("classified"),
        with_texts(class_rows(60)),
        with_texts(class_rows(8, seed=1)),
        task="sequence_classification",
        schema=TEXTS,
        labels=["a", "b", "c"],
    )


def run(folder, data, training, *, killed=False, ranks=1, strategy="auto", model=MODEL):
    """Train to the end under the supervisor; return the run's workspace."""
    compute = {
        "device": "cpu",
        "nproc_per_node": ranks,
        "threads_per_rank": 1,
        "strategy": strategy,
    }
    bench = Bench.make(
        folder,
        data,
        model=model,
        training={**RECIPE, **training},
        compute=compute,
        recovery={"backoff_seconds": 0},
    )
    launcher = ForkedLauncher(ranks)
    outcome = train(bench, launcher=launcher, sinks=[KillsOnce(launcher)] if killed else [])
    assert (outcome.outcome, outcome.attempts) == ("finished", 1 + killed), outcome
    return bench.workspace


@selected.each("name", list(TRAINING), few=["r_drop", "mixup"])
def test_killed_run_ends_with_the_same_weights(tmp_path, classified, name):
    whole = run(tmp_path / "whole", classified, TRAINING[name])
    killed = run(tmp_path / "killed", classified, TRAINING[name], killed=True)
    assert weights_digest(killed) == weights_digest(whole)


@pytest.mark.long
def test_killed_run_of_a_language_model_ends_with_the_same_weights(tmp_path):
    data = write_data(tmp_path / "data", language_rows(40), language_rows(4, seed=1))
    training = {"r_drop": {"weight": 1.0}, "focal_loss": {"gamma": 1.0}}
    model = {"config": GPT2}
    whole = run(tmp_path / "whole", data, training, model=model)
    killed = run(tmp_path / "killed", data, training, model=model, killed=True)
    assert weights_digest(killed) == weights_digest(whole)


@pytest.fixture(scope="module")
def alone(request, classified, tmp_path_factory):
    """Return the losses of one rank, by technique: without dropout, which differs between ranks."""
    folder = tmp_path_factory.mktemp("alone")
    wanted = sorted(selected.selected(request, "technique"))
    return {
        name: losses_of(run(folder / name, classified, still(name), model=STILL)) for name in wanted
    }


def still(name):
    return {field: value for field, value in TRAINING[name].items() if field != "r_drop"}


@selected.each("technique", list(TRAINING), few=[])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1", "zero3"])
def test_two_ranks_match_one(tmp_path, classified, alone, technique, strategy):
    shared = run(tmp_path, classified, still(technique), ranks=2, strategy=strategy, model=STILL)
    assert losses_of(shared) == pytest.approx(alone[technique], rel=1e-4)

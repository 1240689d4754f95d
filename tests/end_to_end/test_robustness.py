"""Regularized and robust classifiers in full runs: killed and resumed, and on two ranks."""

from __future__ import annotations

import pytest

from support import selected, whole_runs
from support.task_data import data_of
from support.training import LLAMA, losses_of
from support.weight_digests import BERT
from support.whole_runs import RECIPE

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
        "order": "balanced",
    },
    "mixup, attacked": {"mixup": {"alpha": 1.0}, "adversarial": {"kind": "pgd", "steps": 2}},
}
"""The fields of `training`, by the technique that they show."""


@pytest.fixture(scope="module")
def classified(tmp_path_factory):
    return data_of("sequence_classification", tmp_path_factory.mktemp("classified"))


def run(folder, data, training, *, model=STILL, micro_batch=RECIPE["micro_batch_size"], **how):
    """Train to the end under the supervisor; return the run's workspace."""
    recipe = {**RECIPE, **training, "micro_batch_size": micro_batch}
    return whole_runs.run(folder, data, {"model": model, "training": recipe}, **how)


@pytest.fixture(scope="module")
def alone(request, classified, tmp_path_factory):
    """Return the losses of one rank, by technique: without dropout, which differs between ranks."""
    folder = tmp_path_factory.mktemp("alone")
    wanted = sorted(selected.selected(request, "technique"))
    return {name: losses_of(run(folder / name, classified, still(name))) for name in wanted}


def still(name):
    return {field: value for field, value in TRAINING[name].items() if field != "r_drop"}


@selected.each("technique", list(TRAINING), few=[])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1", "zero3"])
def test_two_ranks_match_one(tmp_path, classified, alone, technique, strategy):
    shared = run(tmp_path, classified, still(technique), ranks=2, strategy=strategy)
    assert losses_of(shared) == pytest.approx(alone[technique], rel=1e-4)


STEPS = {
    "fgm": {"adversarial": {"kind": "fgm", "epsilon": 0.3}},
    "pgd": {"adversarial": {"kind": "pgd", "steps": 2, "epsilon": 0.3}},
    "freelb": {"adversarial": {"kind": "freelb", "norm": "linf", "epsilon": 0.02}},
}
UNLABELED = ("masked_lm", "causal_lm", "supervised_finetuning", "denoising")
OTHER_TASKS = {
    **{
        f"multi_task, {kind}": {"multi_task": {"loss_weighting": "uncertainty"}, **STEPS[kind]}
        for kind in STEPS
    },
    **{f"{task}, {kind}": STEPS[kind] for task in UNLABELED for kind in STEPS},
    # A document is limited in the same way wherever a curriculum cuts it.
    "causal_lm, cut": {
        "curriculum": {"by": "sequence_length", "start": 0.2, "over": 0.8},
        "contrastive": {"weight": 0.5},
        **STEPS["pgd"],
    },
}
"""The fields of `training`, by task and technique."""
WITHOUT_DROPOUT = {
    "multi_task": STILL,
    "masked_lm": {"config": BERT, "dropout": {"hidden": 0.0, "attention": 0.0}},
    **{task: {"config": LLAMA} for task in UNLABELED[1:]},
}


def run_of(folder, of_task, case, models, *, training=None, **how):
    task = case.partition(", ")[0]
    training = OTHER_TASKS[case] if training is None else training
    return run(folder, of_task[task], training, model=models[task], **how)


@pytest.fixture(scope="module")
def of_task(tmp_path_factory):
    """Return the data of each task."""
    folder = tmp_path_factory.mktemp("tasks")
    return {task: data_of(task, folder / task) for task in ("multi_task", *UNLABELED)}


@pytest.fixture(scope="module")
def calm(request, of_task, tmp_path_factory):
    """Return the losses of one rank without dropout, by task and technique."""
    folder = tmp_path_factory.mktemp("calm")
    wanted = selected.selected(request, "case")
    return {
        case: losses_of(run_of(folder / case, of_task, case, WITHOUT_DROPOUT))
        for case in sorted(wanted)
    }


@selected.each("case", OTHER_TASKS, few=["causal_lm, fgm"])
@selected.each("strategy", ["ddp", "fsdp", "zero1", "zero3"], few=["fsdp"])
def test_two_ranks_match_one_in_another_task(tmp_path, of_task, calm, case, strategy):
    shared = run_of(tmp_path, of_task, case, WITHOUT_DROPOUT, ranks=2, strategy=strategy)
    assert losses_of(shared) == pytest.approx(calm[case], rel=1e-4)


@selected.each("case", OTHER_TASKS, few=["causal_lm, fgm"])
def test_smaller_micro_batches_are_attacked_alike(tmp_path, of_task, calm, case):
    halved = run_of(tmp_path / "halved", of_task, case, WITHOUT_DROPOUT, micro_batch=1)
    assert losses_of(halved) == pytest.approx(calm[case], rel=1e-5)
    training = {name: item for name, item in OTHER_TASKS[case].items() if name != "adversarial"}
    plain = run_of(tmp_path / "plain", of_task, case, WITHOUT_DROPOUT, training=training)
    assert losses_of(plain) != pytest.approx(calm[case], rel=1e-3)

"""A property of every combination that the compatibility table permits, on random samples.

A run that is killed resumes to the same bits, two ranks learn what one does, and a halved
micro-batch keeps the losses. `make long` always has the same sample, and `make soak` a new one. The
seed is printed; set STEADYTRAIN_COMBINATIONS_SEED to repeat it.
"""

from __future__ import annotations

import os
import random
from functools import partial

import pytest

from support import selected
from support.combinations import STEPS, same_weights, sample, train_alone, train_on_two
from support.strategies import RECIPE
from support.task_data import NUMBER, TASKS
from support.training import weights_digest
from support.whole_runs import KillsOnce
from support.whole_runs import run as train

KILLED = {
    "groups": (
        1,
        {
            "layer_decay": 0.8,
            "param_groups": [
                {"match": "embed_tokens", "frozen": True},
                {"match": r"layers\.0\.", "unfreeze_at": 6},
            ],
        },
    ),
    "plateau": (
        1,
        {
            "lr_scheduler_type": "reduce_lr_on_plateau",
            "lr_scheduler_kwargs": {"factor": 0.5, "patience": 0, "threshold": 0.5},
        },
    ),
    "sequence_length": (
        1,
        {"curriculum": {"by": "sequence_length", "start": 0.125, "pacing": "linear", "over": 0.8}},
    ),
    "compression": (2, {"gradient_compression": {"kind": "powersgd", "rank": 1, "start": 2}}),
}


@selected.each("name", KILLED, few=("groups", "sequence_length"))
def test_killed_run_ends_with_the_same_weights(tmp_path, data, name):
    ranks, technique = KILLED[name]

    def digest(run, *, killed):
        training = {
            **RECIPE,
            "max_steps": STEPS,
            "micro_batch_size": 2,
            "eval_steps": 2,
            "save_steps": 1,
            **technique,
        }
        sections = {"run": run, "training": training}
        kills = partial(KillsOnce, step=5, rank=-1) if killed else False
        return weights_digest(
            train(tmp_path, data, sections, killed=kills, ranks=ranks, strategy="ddp")
        )

    assert digest("killed", killed=True) == digest("whole", killed=False)


def check(folder, count, seed, among=TASKS):
    seed = int(os.environ.get("STEADYTRAIN_COMBINATIONS_SEED", seed))
    print(f"STEADYTRAIN_COMBINATIONS_SEED={seed}")
    combinations = sample(seed, count, folder, among)
    shared = train_on_two(folder / "shared", combinations)
    failures = []
    for number, (combination, two) in enumerate(zip(combinations, shared, strict=True)):
        one = train_alone(folder / "alone" / str(number), combination)
        single = {str(step): loss for step, loss in one["whole"].items()}
        rest = {step: loss for step, loss in two["whole"].items() if step in two["resumed"]}
        halves = (folder / "alone" / str(number), folder / "shared" / str(number))
        held = {
            "one rank resumes to the same bits": same_weights(
                halves[0] / "whole", halves[0] / "resumed"
            ),
            "two ranks resume to the same bits": rest == two["resumed"]
            and same_weights(halves[1] / "whole", halves[1] / "resumed"),
            "two ranks learn what one does": not combination.shares
            or two["whole"] == pytest.approx(single, rel=1e-4),
            "a halved micro-batch keeps the losses": not combination.halves
            or one["halved"] == pytest.approx(one["whole"], rel=combination.rounding),
        }
        failures += [f"{combination}: not true: {name}" for name, true in held.items() if not true]
    assert not failures, "\n".join([f"seed {seed}", *failures])


@pytest.mark.long
def test_sampled_combinations_resume_and_agree(tmp_path):
    check(tmp_path, 5, 1)


@pytest.mark.long
def test_combinations_with_numbers_resume_and_agree(tmp_path):
    check(tmp_path, 3, 1, [NUMBER])


@pytest.mark.soak
def test_many_sampled_combinations_resume_and_agree(tmp_path):
    check(tmp_path, 100, random.randrange(10**6))

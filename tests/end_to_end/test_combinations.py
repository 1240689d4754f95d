"""A property of every combination that the compatibility table permits, on random samples.

A run that is killed resumes to the same bits, two ranks learn what one does, and a halved
micro-batch keeps the losses. The seed is printed; set STEADYTRAIN_COMBINATIONS_SEED to repeat it.
"""

from __future__ import annotations

import os
import random

import pytest

from support.combinations import same_weights, sample, train_alone, train_on_two


def check(folder, count):
    seed = int(os.environ.get("STEADYTRAIN_COMBINATIONS_SEED", random.randrange(10**6)))
    print(f"STEADYTRAIN_COMBINATIONS_SEED={seed}")
    combinations = sample(seed, count)
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
            "two ranks learn what one does": combination.compressed
            or two["whole"] == pytest.approx(single, rel=1e-4),
            "a halved micro-batch keeps the losses": one["halved"]
            == pytest.approx(one["whole"], rel=1e-5),
        }
        failures += [f"{combination}: not true: {name}" for name, true in held.items() if not true]
    assert not failures, "\n".join([f"seed {seed}", *failures])


@pytest.mark.long
def test_sampled_combinations_resume_and_agree(tmp_path):
    check(tmp_path, 5)


@pytest.mark.soak
def test_many_sampled_combinations_resume_and_agree(tmp_path):
    check(tmp_path, 100)

"""Runs with every technique are killed, and samples of all that the compatibility table permits.

A run that is killed resumes to the same bits, two ranks learn what one does, and a halved
micro-batch keeps the losses. `make long` always has the same sample, and `make soak` a new one. The
seed is printed; set STEADYTRAIN_COMBINATIONS_SEED to repeat it.
"""

from __future__ import annotations

import os
import random
from functools import partial
from itertools import combinations

import pytest

from support import selected
from support.combinations import (
    REFERENCED,
    joined,
    same_weights,
    sample,
    sections_of,
    techniques_of,
    train_alone,
    train_on_two,
    variants,
)
from support.snippets import ROOT
from support.task_data import NUMBER, TASKS, data_of, write_reference
from support.training import weights_digest
from support.whole_runs import KillsOnce
from support.whole_runs import run as train

COMBINATIONS = {
    "spans": (
        "denoising",
        "spans, contrastive, teacher, by loss, freelb, ema, label smoothing, dropout, frozen, "
        "layer decay, monitor",
    ),
    "parts": (
        "multi_task",
        "learned loss weights, r-drop, class weights, focal loss, augmentation, swa, label "
        "smoothing, dropout, unfreezing, layer decay, monitor",
    ),
    "compared texts": (
        "sequence_classification",
        "in-batch contrastive, hidden states, fgm, augmentation, balanced order, swa, label "
        "smoothing, dropout, frozen, layer decay, monitor",
    ),
    "mixed texts": (
        "sequence_classification",
        "mixup, pgd, by length, class weights, focal loss, augmentation, ema, label "
        "smoothing, dropout, unfreezing, layer decay, powersgd",
    ),
    "masks": (
        "masked_lm",
        "masking, freelb, by length, ema, label smoothing, unfreezing, layer decay, monitor",
    ),
    "pairs of answers": (
        "preference",
        "by length, swa, label smoothing, dropout, unfreezing, layer decay, monitor",
    ),
    "spans on two ranks": (
        "denoising",
        "spans, contrastive, teacher, by loss, freelb, dropout, frozen, monitor, powersgd",
    ),
    "parts on two ranks": (
        "multi_task",
        "learned loss weights, r-drop, class weights, focal loss, augmentation, swa, bf16",
    ),
    "compared texts on two ranks": (
        "sequence_classification",
        "in-batch contrastive, hidden states, fgm, bf16",
    ),
    "masks on two ranks": ("masked_lm", "masking, freelb, bf16"),
    "pairs of answers on two ranks": ("preference", "by length, dropout, unfreezing, powersgd"),
    "growing texts": (
        "causal_lm",
        "by sequence length, r-drop, focal loss, swa, label smoothing, dropout, unfreezing, "
        "layer decay, bf16, monitor",
    ),
    "stored answers": (
        "supervised_finetuning",
        "stored answers, contrastive, by loss, swa, label smoothing, dropout, frozen, layer "
        "decay, bf16, monitor",
    ),
    "sets of labels": (
        "multi_label_classification",
        "fgm, augmentation, by length, swa, dropout, unfreezing, layer decay, bf16, monitor",
    ),
    "numbers": (
        "sequence_regression",
        "fgm, augmentation, by loss, ema, frozen, layer decay, powersgd, monitor",
    ),
    "pairs of texts": (
        "text_embedding",
        "in-batch contrastive, label smoothing, ema, frozen, layer decay, bf16, monitor",
    ),
    "marked answers": (
        "unpaired_preference",
        "by length, swa, dropout, unfreezing, layer decay, powersgd, monitor",
    ),
    "two passes": ("sequence_classification", "r-drop, mixup, focal loss, balanced order"),
    "compared in order": (
        "sequence_classification",
        "in-batch contrastive, by length, focal loss, class weights",
    ),
    "two passes over spans": ("denoising", "spans, r-drop, focal loss"),
    "attacked answers": ("causal_lm", "fgm, teacher, contrastive, plateau"),
    "attacked chats": ("supervised_finetuning", "freelb, contrastive, focal loss"),
    "attacked parts": ("multi_task", "pgd, learned loss weights"),
}
"""Tasks and variants of techniques. Any two techniques that go together are in one of them."""
FEW = ("spans", "parts", "compared texts", "mixed texts", "masks", "pairs of answers")
"""These have every technique. The others have the other pairs and tasks."""
ELSEWHERE = {
    "image_augmentation": (
        "tests/unit/images/test_training.py",
        "resumed_run_has_the_same_weights",
    ),
    "mixture": (
        "tests/end_to_end/test_several_data_sets.py",
        "mixture_of_texts_is_the_same_after_a_kill_and_on_two_ranks",
    ),
}
"""Techniques that need other data, and the tests that kill or resume their runs."""


def configured(name, reference="none"):
    task, variants = COMBINATIONS[name]
    config = joined(task, reference, variants.split(", "))
    assert config is not None, f"{task} with {variants} is rejected"
    return config


@selected.each("name", COMBINATIONS, few=FEW)
def test_killed_run_ends_with_the_same_weights(tmp_path, name):
    task, _ = COMBINATIONS[name]
    referenced = task in REFERENCED
    reference = write_reference(task, tmp_path / "reference") if referenced else "none"
    config = configured(name, reference)
    data, sections = data_of(task, tmp_path / "data"), sections_of(config)
    ranks, strategy = config.compute.nproc_per_node, config.compute.strategy
    whole = train(tmp_path / "whole", data, sections, ranks=ranks, strategy=strategy)
    kills = partial(KillsOnce, rank=-1)
    killed = train(
        tmp_path / "killed", data, sections, killed=kills, ranks=ranks, strategy=strategy
    )
    assert weights_digest(killed) == weights_digest(whole)


def test_every_technique_is_killed_in_a_combination():
    folders = {path.parent.name for path in (ROOT / "components/techniques").glob("*/__init__.py")}
    assert folders == set(ELSEWHERE).union(*(techniques_of(configured(name)) for name in FEW))
    for file, test in ELSEWHERE.values():
        assert f"def test_{test}(" in (ROOT / file).read_text()


@pytest.mark.long
def test_every_two_techniques_that_go_together_are_killed_together():
    together = {pair for name in COMBINATIONS for pair in pairs_of(configured(name))}
    for task in TASKS:
        alone = [name for name in variants("none") if joined(task, "none", [name])]
        for one, other in combinations(alone, 2):
            config = joined(task, "none", [one, other])
            left = pairs_of(config) - together if config else set()
            assert not left, f"{task} permits {one} with {other}, which no combination has"


def pairs_of(config):
    return {frozenset(pair) for pair in combinations(techniques_of(config), 2)}


def check(folder, count, seed, among=TASKS):
    seed = int(os.environ.get("STEADYTRAIN_COMBINATIONS_SEED", seed))
    print(f"STEADYTRAIN_COMBINATIONS_SEED={seed}")
    drawn = sample(seed, count, folder, among)
    shared = train_on_two(folder / "shared", drawn)
    failures = []
    for number, (combination, two) in enumerate(zip(drawn, shared, strict=True)):
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

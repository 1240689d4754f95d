"""A spike is detected at its step. Normal training has no spikes."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from steadytrain.components.shared.events.types import TrainingDiverged
from steadytrain.components.train.checkpoint.store import committed
from steadytrain.components.train.failures import Diverged
from steadytrain.components.train.loop.progress import highest_normal_loss

from support.training import Bench, contradict, events_of, language_rows, write_data

RULE = {"threshold": 6.0, "window": 128}


def limit(losses, first=10.0, **changes):
    return highest_normal_loss(losses, first, **{**RULE, **changes})


def settled(count=128, level=3.0, noise=0.1, seed=0):
    draw = random.Random(seed)
    return [draw.gauss(level, noise) for _ in range(count)]


def test_spike_stands_above_the_noise():
    assert max(settled(seed=1)) < limit(settled()) < 7


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_non_finite_losses_do_not_disable_detection(wrong):
    """One NaN in a window makes a mean NaN, and no loss is above that."""
    assert limit([wrong, *settled(127)]) == pytest.approx(limit(settled(127)))


def test_spike_in_the_window_does_not_hide_the_next():
    assert limit([*settled(127), 9.0]) < 7


@pytest.mark.parametrize(
    ("losses", "first", "changes"),
    [
        ([], None, {}),
        (settled(63), 10.0, {}),
        (settled(), 10.0, {"threshold": 0.0}),
        ([math.nan] * 128, 10.0, {}),
    ],
    ids=["no step yet", "under half a window", "switched off", "nothing finite"],
)
def test_too_few_losses_give_no_spike(losses, first, changes):
    assert limit(losses, first, **changes) == math.inf


def test_hard_batch_in_a_settled_run_is_not_a_spike():
    """It is many standard deviations out, but undoes little of what was learned."""
    assert limit(settled(level=0.001, noise=0.0001), first=1.1) > 0.5


@pytest.mark.parametrize("seed", range(20))
def test_no_normal_training_spikes(seed):
    """The loss falls by a power law, with heavy-tailed noise that shrinks along with it."""
    draw = np.random.default_rng(seed)
    steps = np.arange(1, 1500)
    curve = 2 + 8 * steps**-0.3
    losses = list(curve * (1 + 0.03 * draw.standard_t(4, len(steps))))
    for step in range(1, len(losses)):
        assert losses[step] <= limit(losses[max(0, step - 128) : step], losses[0])


STEPS, GUILTY, BATCH = 60, 40, 4


@pytest.fixture
def poisoned(tmp_path):
    """Make a run whose global batch 40 contradicts everything learned before it."""
    rows = language_rows(STEPS * BATCH)
    contradict(rows, GUILTY, size=BATCH)
    data = write_data(tmp_path / "data", rows, [])

    def make(name, **recovery):
        return Bench.make(
            tmp_path / name,
            data,
            training={
                "global_batch_size": BATCH,
                "max_steps": STEPS,
                "learning_rate": 2e-2,
                "lr_scheduler_type": "constant",
                "save_steps": 10,
            },
            recovery=recovery,
        )

    return make


@pytest.mark.slow
def test_batch_that_contradicts_what_was_learned_is_a_spike(poisoned):
    run = poisoned("seen", spike_window=20)
    with pytest.raises(Diverged, match=f"at step {GUILTY + 1}: .* spike"):
        run.train_here()
    (told,) = events_of(run.workspace, TrainingDiverged)
    assert told.step == GUILTY + 1
    assert committed(run.workspace.checkpoints)[-1].name == f"step-{GUILTY:08d}"


@pytest.mark.slow
def test_after_a_resume_the_spike_is_seen_as_before(poisoned):
    """The window is part of the checkpoint, so a resumed run decides as the first one did."""
    run = poisoned("again", spike_window=20)
    with pytest.raises(Diverged) as first:
        run.train_here()
    with pytest.raises(Diverged) as again:
        run.train_here(2, resume_from=committed(run.workspace.checkpoints)[-2])
    assert str(again.value) == str(first.value)


@pytest.mark.slow
def test_training_continues_if_the_check_is_off(poisoned):
    run = poisoned("off", spike_threshold=0)
    assert run.train_here().progress.step == STEPS

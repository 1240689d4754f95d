"""The gradient noise scale: the estimator, what it measures, and that it changes nothing."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch

from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.errors import ConfigError
from steadytrain.components.shared.events.types import NoiseScaleMeasured, Warned
from steadytrain.components.techniques.noise_scale.estimate import NoiseEstimate, NoiseScale
from steadytrain.components.train.recovery.takeover import inputs_digest

from support.forked import on_ranks
from support.strategies import RECIPE, train
from support.training import Bench, events_of, weights_digest, write_data

ON = {"monitor": {"noise_scale": True, "every_steps": 2}}


def test_estimate_converges_to_the_ratio_of_noise_and_signal():
    """With Gaussian gradients, tr(S) and |G|^2 are known."""
    numbers = np.random.default_rng(0)
    true, deviation, size, parts = np.full(50, 0.1), 2.0, 64, 8
    found, tail = NoiseEstimate(), []
    for step in range(3000):
        examples = true + deviation * numbers.standard_normal((parts, size // parts, 50))
        small = examples.mean(axis=1)
        found.add(parts, (small**2).sum(axis=1).mean(), (small.mean(axis=0) ** 2).sum())
        tail += [(found.noise, found.signal)] if step > 300 else []
    noise, signal = np.mean(tail, axis=0)
    assert noise == pytest.approx(50 * deviation**2 / size, rel=0.02)
    assert signal == pytest.approx((true**2).sum(), rel=0.1)
    assert noise / signal * size == pytest.approx(50 * deviation**2 / (true**2).sum(), rel=0.1)


def test_estimate_is_that_of_the_paper():
    """McCandlish et al. 2018, equations A.2 and A.3, with B_small = B / parts."""
    small_square, big_square, big, parts = 7.0, 3.0, 96, 4
    small = big / parts
    signal = (big * big_square - small * small_square) / (big - small)
    trace = (small_square - big_square) / (1 / small - 1 / big)
    found = NoiseEstimate()
    found.add(parts, small_square, big_square)
    assert found.batches * big == pytest.approx(trace / signal)


def test_noise_that_hides_the_signal_gives_no_number():
    found = NoiseEstimate()
    assert found.batches is None
    found.add(2, 10.0, 1.0)
    assert found.batches is None


def test_weights_and_identity_are_the_same_and_each_micro_batch_is_measured(
    make_bench, monkeypatch
):
    plain = make_bench("plain", training={"max_steps": 6})
    watched = make_bench("watched", training={**ON, "max_steps": 6})
    plain.train_here()
    seen, added = [], []
    inner, add = NoiseScale.after_backward, NoiseEstimate.add

    def spy(self, batch):
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        total = torch.cat([item.flatten().double() for item in gradients])
        seen.append((self.targets(batch), total))
        inner(self, batch)

    def note(self, *measured):
        added.append((*measured, len(seen)))
        add(self, *measured)

    monkeypatch.setattr(NoiseScale, "after_backward", spy)
    monkeypatch.setattr(NoiseEstimate, "add", note)
    watched.train_here()
    assert weights_digest(plain.workspace) == weights_digest(watched.workspace)
    assert inputs_digest(plain.config, plain.data) == inputs_digest(watched.config, plain.data)
    events = events_of(watched.workspace, NoiseScaleMeasured)
    assert [event.step for event in events] == [2, 4, 6]
    assert events_of(plain.workspace, NoiseScaleMeasured) == []
    # The gradients by themselves, as differences of what has added up.
    parts, mean_square, square, last = added[-1]
    assert parts >= 2
    step = seen[last - parts : last]
    sums = [total for _, total in step]
    own = [sums[0], *(after - before for before, after in pairwise(sums))]
    targets = [weight for weight, _ in step]
    expected = sum(
        sum(targets) / weight * float(gradient.square().sum())
        for weight, gradient in zip(targets, own, strict=True)
    )
    assert mean_square == pytest.approx(expected, rel=1e-4)
    assert square == pytest.approx(float(sums[-1].square().sum()), rel=1e-4)


@pytest.mark.slow
def test_estimate_continues_exactly_after_a_resume(make_bench):
    whole, cut = (
        make_bench(name, training={**ON, "load_best_model_at_end": False}) for name in ("a", "b")
    )
    whole.train_here()
    cut.train_here()
    earlier = events_of(cut.workspace, NoiseScaleMeasured)
    cut.train_here(2, resume_from=cut.workspace.checkpoints / "step-00000003")
    again = [event for event in events_of(cut.workspace, NoiseScaleMeasured) if event.attempt == 2]
    assert again
    values = [(item.step, item.noise, item.signal) for item in again]
    assert values == [(item.step, item.noise, item.signal) for item in earlier if item.step > 3]
    assert weights_digest(cut.workspace) == weights_digest(whole.workspace)


def test_single_micro_batch_is_reported_once(make_bench):
    bench = make_bench("one", training={**ON, "max_steps": 4, "micro_batch_size": 4})
    bench.train_here()
    assert events_of(bench.workspace, NoiseScaleMeasured) == []
    (warned,) = [
        event for event in events_of(bench.workspace, Warned) if "noise_scale" in event.message
    ]
    assert "training.micro_batch_size" in warned.message


@pytest.mark.parametrize(
    ("training", "compute", "words"),
    [
        ({"global_batch_size": 1}, {}, "at least two micro-batches"),
        ({}, {"strategy": "fsdp"}, "whole gradient"),
        ({}, {"strategy": "zero2"}, "whole gradient"),
    ],
)
def test_settings_that_cannot_be_measured_are_errors(training, compute, words):
    content = {"name": "x", "data": {"source": ["a"]}, "model": {"config": {"model_type": "llama"}}}
    content |= {"training": {**training, "monitor": {"noise_scale": True}}, "compute": compute}
    with pytest.raises(ConfigError, match=words):
        from_mapping(content)


@pytest.mark.long
def test_two_ranks_measure_what_one_rank_does(tmp_path):
    found = []
    recipe = {**RECIPE, **ON, "max_steps": 6}
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        on_ranks(ranks, partial(train, training=recipe), folder, "ddp" if ranks > 1 else "single")
        bench = Bench.make(folder, write_data(folder / "none", [], []))
        events = events_of(bench.workspace, NoiseScaleMeasured)
        found.append([(event.step, event.noise, event.signal) for event in events])
    one, two = found
    assert [step for step, _, _ in one] == [2, 4, 6]
    for (_, *expected), (_, *measured) in zip(one, two, strict=True):
        assert measured == pytest.approx(expected, rel=1e-3)

"""The monitor of layers: what it measures, under each strategy, and that it changes nothing."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest

from steadytrain.components.observe.diagnosis import findings
from steadytrain.components.observe.profile import Profile
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.points import by_layer
from steadytrain.components.shared.events.types import LayersCounted, LayersMeasured
from steadytrain.components.tasks.causal_lm import SupervisedFineTuning
from steadytrain.components.train.loop import monitors
from steadytrain.components.train.loop.monitors import layer_of
from steadytrain.components.train.recovery.takeover import inputs_digest

from support.forked import on_ranks
from support.strategies import RECIPE, train
from support.training import Bench, events_of, exported, weights_digest, write_data

WATCHED = {"monitor": {"layers": True, "histograms": True, "every_steps": 2}}
TWO_RANKS = {**RECIPE, **WATCHED, "max_steps": 4, "profile": {"steps": [2, 3]}}
ENDS = ("json", "trace.json.gz")


def measured(bench):
    return events_of(bench.workspace, LayersMeasured)


def check_histograms(found, tensors):
    """Compare histograms of layers with those that NumPy makes of complete tensors."""
    layers = {}
    for name, tensor in tensors.items():
        layers.setdefault(layer_of(name), []).append(np.asarray(tensor, np.float32).ravel())
    shown = by_layer(found)
    assert shown.keys() == layers.keys()
    for layer, parts in layers.items():
        values, one = np.concatenate(parts), shown[layer]
        assert (one.low, one.high) == (values.min(), values.max())
        # The intervals of NumPy's own choice, and its own comparison with their ends.
        ends = np.histogram_bin_edges(values, bins=monitors.BINS, range=(one.low, one.high))
        assert one.edges == pytest.approx(ends, rel=1e-6, abs=1e-7)
        counts, _ = np.histogram(values, bins=np.array(one.edges, np.float32))
        assert list(one.counts) == counts.tolist(), layer


def test_weights_are_the_same_to_the_bit_and_so_is_the_identity(make_bench):
    plain, watched = make_bench("plain"), make_bench("watched", training=WATCHED)
    plain.train_here()
    watched.train_here()
    assert weights_digest(plain.workspace) == weights_digest(watched.workspace)
    assert [event.step for event in measured(watched)] == [2, 4, 6]
    assert measured(plain) == []
    assert plain.config.model_copy(update={"output": "x"}).digest() == (
        watched.config.model_copy(update={"output": "x"}).digest()
    )
    data = plain.data
    assert inputs_digest(plain.config, data) == inputs_digest(watched.config, data)


def test_norms_are_those_of_the_gradients_the_weights_and_the_update(make_bench, monkeypatch):
    """Every weight of this model is smaller than the sample, so the update is exact, too."""
    before = make_bench("before", training={"max_steps": 6})
    before.train_here()
    after = make_bench("after", training={**WATCHED, "max_steps": 6, "max_grad_norm": 1e-3})
    taken = {}
    prompt = monitors.LayerMonitor.before_update

    def spy(self, update):
        weights = {name: item.clone() for name, item in self.context.weights.items()}
        gradients = {name: item.clone() for name, item in self.context.gradients().items()}
        taken[update.step] = weights, gradients, update.grad_norm
        prompt(self, update)

    monkeypatch.setattr(monitors.LayerMonitor, "before_update", spy)
    training = after.train_here()
    last = measured(after)[-1]
    weights, gradients, norm = taken[6]
    moved = {name: item - weights[name] for name, item in training.parts.strategy.weights().items()}
    clipped = math.sqrt(sum(float(item.square().sum()) for item in gradients.values()))
    assert norm > 2 * clipped
    for found, tensors, scale in (
        (last.gradient, gradients, norm / clipped),
        (last.weight, weights, 1.0),
        (last.update, moved, 1.0),
    ):
        expected = {}
        for name, item in tensors.items():
            layer = layer_of(name)
            expected[layer] = expected.get(layer, 0.0) + float(item.square().sum())
        assert found == pytest.approx(
            {name: scale * math.sqrt(value) for name, value in expected.items()}, rel=1e-4
        )
    assert math.hypot(*last.gradient.values()) == pytest.approx(norm)
    counted = events_of(after.workspace, LayersCounted)
    assert [event.step for event in counted] == [2, 4, 6]
    check_histograms(counted[-1].weight, exported(after))
    check_histograms(counted[-1].gradient, gradients)


@pytest.mark.slow
def test_update_of_a_large_weight_is_estimated_well(make_bench, monkeypatch):
    exact, sampled = make_bench("exact", training=WATCHED), make_bench("sampled", training=WATCHED)
    exact.train_here()
    monkeypatch.setattr(monitors, "SAMPLE", 256)
    sampled.train_here()
    for one, other in zip(measured(exact), measured(sampled), strict=True):
        assert one.weight == other.weight
        assert other.update == pytest.approx(one.update, rel=0.2)


def test_layers_are_named_by_their_number_or_their_module():
    assert layer_of("model.layers.3.mlp.up_proj.weight") == "model.layers.3"
    assert layer_of("transformer.h.11.attn.c_attn.bias") == "transformer.h.11"
    assert layer_of("model.embed_tokens.weight") == "model.embed_tokens"
    assert layer_of("weight") == "weight"


@pytest.mark.long
@pytest.mark.slow
def test_all_strategies_measure_the_same(tmp_path):
    found, histograms = {}, {}
    for name in ("ddp", "fsdp", "zero1", "zero2", "zero3"):
        folder = tmp_path / name
        folder.mkdir()
        on_ranks(2, partial(train, training=TWO_RANKS), folder, name)
        data = write_data(folder / "none", [], [])
        bench = Bench.make(folder, data)
        found[name], histograms[name] = measured(bench), events_of(bench.workspace, LayersCounted)
        check_histograms(histograms[name][-1].weight, exported(bench))
    whole = by_layer(histograms["ddp"][-1].gradient)
    for name in found:
        assert [event.step for event in histograms[name]] == [2, 4]
        for one, other in zip(found["ddp"], found[name], strict=True):
            for field in ("gradient", "weight", "update"):
                expected = pytest.approx(getattr(one, field), rel=1e-2)
                assert getattr(other, field) == expected, (name, field)
        shown = by_layer(histograms[name][-1].gradient)
        assert shown.keys() == whole.keys()
        for layer, one in shown.items():
            same = whole[layer]
            assert (one.low, one.high) == pytest.approx((same.low, same.high), rel=1e-3), name
            assert sum(one.counts) == sum(same.counts)
            # Rounding moves a value at the end of an interval.
            moved = sum(abs(a - b) for a, b in zip(one.counts, same.counts, strict=True))
            assert moved <= 0.01 * sum(same.counts), (name, layer)
    # The same runs are profiled.
    for strategy in found:
        bench = Bench.make(tmp_path / strategy, data, training=TWO_RANKS)
        names = {path.name for path in (bench.workspace.folder / "profile").iterdir()}
        assert names == {f"rank-{rank}.{end}" for rank in (0, 1) for end in ENDS}
        lines = Profile.of(bench.config).lines()
        assert lines[0].startswith("steps 2 to 3 of 2 ranks on cpu: ")
        assert len(lines) <= 10


def test_layer_without_gradients_is_found(make_bench, monkeypatch):
    prompt = SupervisedFineTuning.build_model

    def build(self):
        model = prompt(self)
        for weight in model.model.layers[0].parameters():
            weight.register_hook(lambda gradient: gradient * 1e-6)
        return model

    monkeypatch.setattr(SupervisedFineTuning, "build_model", build)
    bench = make_bench(training=WATCHED)
    bench.train_here()
    (found,) = [
        item
        for item in findings(read_events(bench.workspace.events))
        if item.rule == "vanishing_gradients"
    ]
    assert "model.layers.0" in found.evidence


@pytest.mark.parametrize(
    ("rate", "rule"), [(1.0, "learning_rate_too_high"), (1e-9, "learning_rate_too_low")]
)
def test_learning_rate_is_judged_by_the_update(make_bench, rate, rule):
    recipe = {"learning_rate": rate, "warmup_steps": 0, "lr_scheduler_type": "constant"}
    wrong = make_bench("wrong", training={**WATCHED, **recipe})
    right = make_bench("right", training={**WATCHED, **recipe, "learning_rate": 1e-3})
    for bench in (wrong, right):
        bench.train_here()
    rules = [
        {item.rule for item in findings(read_events(bench.workspace.events))}
        for bench in (wrong, right)
    ]
    assert rule in rules[0]
    assert not {rule, "vanishing_gradients"} & rules[1]

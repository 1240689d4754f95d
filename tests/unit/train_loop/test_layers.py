"""The monitor of layers: what it measures, under each strategy, and that it changes nothing."""

from __future__ import annotations

import math
from functools import partial

import pytest

from steadytrain.components.observe.diagnosis import findings
from steadytrain.components.observe.profile import Profile
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.errors import ConfigError
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import LayersMeasured
from steadytrain.components.tasks.causal_lm import SupervisedFineTuning
from steadytrain.components.train.loop import monitors
from steadytrain.components.train.loop.monitors import layer_of
from steadytrain.components.train.recovery.takeover import inputs_digest

from support.forked import on_ranks
from support.strategies import RECIPE, train
from support.training import LLAMA, Bench, events_of, weights_digest, write_data

WATCHED = {"monitor": {"layers": True, "every_steps": 2}}
TWO_RANKS = {**RECIPE, **WATCHED, "max_steps": 4, "profile": {"steps": [2, 3]}}
ENDS = ("json", "trace.json.gz")


def measured(bench):
    return events_of(bench.workspace, LayersMeasured)


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


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_zero_is_refused_before_anything_starts(strategy):
    content = {
        "name": "a",
        "data": {"source": ["a.txt"]},
        "model": {"config": LLAMA},
        "compute": {"strategy": strategy},
        "training": WATCHED,
    }
    with pytest.raises(ConfigError, match=r"DeepSpeed .*training\.monitor\.layers is true"):
        from_mapping(content)


@pytest.mark.long
@pytest.mark.slow
def test_ddp_and_fsdp_measure_the_same(tmp_path):
    found = {}
    for strategy in ("ddp", "fsdp"):
        folder = tmp_path / strategy
        folder.mkdir()
        on_ranks(2, partial(train, training=TWO_RANKS), folder, strategy)
        data = write_data(folder / "none", [], [])
        bench = Bench.make(folder, data)
        found[strategy] = measured(bench)
    for one, other in zip(found["ddp"], found["fsdp"], strict=True):
        for field in ("gradient", "weight", "update"):
            assert getattr(one, field) == pytest.approx(getattr(other, field), rel=1e-2), field
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

"""A range test finds the rates at which the loss falls, and changes nothing."""

from __future__ import annotations

import contextlib
import json
import math

import pytest
from typer.testing import CliRunner

import steadytrain.components.tune.lr_range as range_run
import steadytrain.components.tune.trials.local as runner
from steadytrain.components.shared.config import TrainingConfig, load
from steadytrain.components.shared.config.schedules import ScheduleSettings, schedule_spec
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.events.types import AttemptEnded, TrainingStep
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.tune.lr_range import (
    Losses,
    curve_of,
    exploded,
    range_config,
    range_folder,
    range_test,
    suggested,
)
from steadytrain.pipelines.cli import app

from support.command import TINY_LM

RATES = [10 ** (-6 + 6 * index / 119) for index in range(120)]


def losses(*, falls=1e-4, lowest=1e-2, floor=2.0, start=6.0):
    """A loss that falls between two rates, per decade equally, and then explodes."""
    found = []
    for rate in RATES:
        share = math.log10(rate / falls) / math.log10(lowest / falls)
        value = start - (start - floor) * min(1.0, max(0.0, share))
        if rate > lowest:
            value *= (rate / lowest) ** 3
        found.append((rate, value))
    return found


def found_of(pairs):
    points, seen = curve_of(pairs), []
    for point in points:
        seen.append(point)
        if exploded(seen):
            return suggested(seen, ended_early=True)
    return suggested(points, ended_early=False)


def test_range_begins_where_the_loss_falls_and_ends_at_its_minimum():
    found = found_of(losses())
    assert found.low == pytest.approx(1e-4, rel=1.2)
    assert found.high == pytest.approx(1e-2, rel=0.7)
    assert found.low < found.steepest < found.high
    assert 1e-2 < found.exploded < 1e-1
    assert found.points[-1].rate == found.exploded


def test_loss_that_never_explodes_has_its_range_end_at_the_last_rate():
    found = found_of(losses(lowest=1.0))
    assert found.high == pytest.approx(1.0)
    assert found.exploded is None


def test_loss_that_never_falls_suggests_nothing():
    found = found_of(losses(falls=1e-2, lowest=1e-1, floor=6.0))
    assert (found.low, found.high, found.steepest) == (None, None, None)
    assert suggested([], ended_early=True).low is None


def test_smoothing_has_no_bias_at_the_start():
    assert [point.smoothed for point in curve_of([(rate, 5.0) for rate in RATES[:9]])] == (
        pytest.approx([5.0] * 9)
    )


def test_rate_grows_exponentially_from_the_lowest_to_the_peak():
    spec = schedule_spec("range_test")
    settings = ScheduleSettings(120, 0, 1.0, spec.options(lowest=1e-6))
    assert [spec.factor(step, settings) for step in range(120)] == pytest.approx(RATES)
    with pytest.raises(ValueError, match="above 0"):
        spec.options(lowest=0)


def test_scaled_rates_are_refused():
    scaled = ["training.lr_scaling=sqrt", "training.base_global_batch_size=8"]
    with pytest.raises(BadInput, match=r"training\.lr_scaling"):
        range_config(load("causal-lm", scaled))


def test_test_keeps_the_recipe_but_for_the_rate_and_the_length():
    config = load("causal-lm", ["training.weight_decay=0.3", "training.lr_scheduler_type=linear"])
    own = range_config(config).training
    changed = {
        name for name in TrainingConfig.model_fields
        if getattr(own, name) != getattr(config.training, name)
    }  # fmt: skip
    assert changed <= {
        "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "max_steps",
        "eval_steps", "save_steps", "logging_steps", "early_stopping_patience",
        "load_best_model_at_end",
    }  # fmt: skip
    assert load(range_config(config).to_yaml()).training == own


def test_steps_after_a_divergence_do_not_count(tmp_path):
    def step(attempt, number, loss):
        return TrainingStep(
            attempt=attempt,
            step=number,
            epoch=0,
            loss=loss,
            learning_rate=number / 10,
            grad_norm=1,
            tokens=1,
            tokens_per_second=1,
            gpu_memory_used=0,
            memory_used=1,
        )

    def failed(attempt, failure):
        return AttemptEnded(attempt=attempt, outcome="failed", step=2, failure_class=failure)

    workspace = Workspace(tmp_path, "trial")
    workspace.create()
    with contextlib.closing(workspace.stream("trial")) as stream:
        for number, loss in ((1, 9.0), (2, 8.0)):
            stream.emit(step(1, number, loss))
        stream.emit(failed(1, "node_lost"))
        for number, loss in ((1, 9.0), (2, 8.0), (3, 7.0)):
            stream.emit(step(2, number, loss))
        stream.emit(failed(2, "divergence"))
        stream.emit(step(3, 1, 1.0))
    found = Losses(workspace.events)
    assert found.now() == [(0.1, 9.0), (0.2, 8.0), (pytest.approx(0.3), 7.0)]
    assert found.diverged


def test_changed_settings_are_tested_again_under_the_same_name(tmp_path):
    def folder(*sets):
        return range_folder(load("causal-lm", ["run=mine", f"output={tmp_path}", *sets]))

    assert folder("model.config.hidden_size=64") != folder("model.config.hidden_size=128")
    assert folder("training.learning_rate=1e-3") == folder("training.learning_rate=1e-2")


@pytest.mark.parametrize("left", [b"", b'{"low": 1e-3, "hi', b'{"points": null}', b"\xff"])
def test_damaged_result_is_tested_again(tmp_path, left):
    class Again(Exception):
        pass

    def again(_):
        raise Again

    config = load("causal-lm", [f"output={tmp_path}"])
    LocalStorage(range_folder(config)).write("lr-range.json", left)
    with pytest.raises(Again):
        range_test(config, again, lambda: None)


@pytest.mark.slow
def test_command_trains_once_and_shows_the_same_range_again(tmp_path, monkeypatch):
    monkeypatch.setattr(range_run, "_STEPS", 30)
    sets = [part for item in TINY_LM for part in ("--set", item)]
    words = ["tune", "causal-lm", "--lr-range", "--json", "--output", str(tmp_path), *sets]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    told = json.loads(done.stdout)
    assert 1e-6 < told["low"] < told["steepest"] <= told["high"] <= 1
    rates = [point["rate"] for point in told["points"]]
    assert rates == pytest.approx([10 ** (-6 + 6 * n / 29) for n in range(len(rates))])
    (folder,) = (tmp_path / "studies").glob("*-lr-range")
    assert "<svg" in (folder / "report.html").read_text()
    assert not list(folder.rglob("*.safetensors")), "the model and the checkpoints are removed"
    monkeypatch.setattr(runner, "local_trials", None)
    text = CliRunner().invoke(app, [word for word in words if word != "--json"]).stdout
    assert "tune.space={training.learning_rate: {low: " in text

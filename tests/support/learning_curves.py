"""Learning curves of real trials, one for each point of a space, so that searches cost seconds.

A promoted trial is bit for bit the run that never paused. So a study over recorded curves decides
as a study over real trials does, except that losses between two points are interpolated.
"""

from __future__ import annotations

import itertools
import json
import math
from bisect import bisect_right

from steadytrain.components.shared.config import from_mapping, load
from steadytrain.components.shared.config.space import changed
from steadytrain.components.tune.trials.local import local_trials

from support.command import wait_for
from support.corpora import write_sources

RATE, WARMUP = "training.learning_rate", "training.warmup_steps"
SCHEDULE = "training.lr_scheduler_type"
POINTS = {
    RATE: [10 ** (-4 + index / 3.5) for index in range(11)],
    WARMUP: [0.0, 0.2],
    SCHEDULE: ["cosine", "constant_with_warmup"],
}
SPACE = {
    RATE: {"low": POINTS[RATE][0], "high": POINTS[RATE][-1], "log": True},
    WARMUP: {"low": POINTS[WARMUP][0], "high": POINTS[WARMUP][-1]},
    SCHEDULE: {"choices": POINTS[SCHEDULE]},
}
"""The space of a study, which the points span."""


def settings_of(*overrides):
    """A causal language model with a million parameters, trained for 81 steps of 256 tokens."""
    return load(
        "tune-causal-lm",
        [
            ("tune.space", SPACE),
            ("data.sequence_length", 32),
            ("model.config.hidden_size", 128),
            ("model.config.intermediate_size", 352),
            ("model.config.num_hidden_layers", 4),
            ("training.adam_beta2", 0.999),
            ("training.max_steps", 81),
            ("training.eval_steps", 3),
            ("compute.device", "cpu"),
            ("compute.threads_per_rank", 1),
            *overrides,
        ],
    )


def loss(curves, config, step):
    """Return a trial's validation loss, interpolated between the four nearest points.

    At a point itself, that is the recorded one. Logarithms of rates are interpolated.
    """
    training = config.training
    rates, warmups = POINTS[RATE], POINTS[WARMUP]
    left, share = _between([math.log(rate) for rate in rates], math.log(training.learning_rate))
    below, part = _between(warmups, training.warmup_steps)
    return sum(
        weight * other * curves[_name(rate, warmup, training)][str(step)]
        for rate, weight in ((rates[left], 1 - share), (rates[left + 1], share))
        for warmup, other in ((warmups[below], 1 - part), (warmups[below + 1], part))
    )


def _between(points, value):
    """Return the point on the left of a value, and how far the value is towards the next one."""
    left = min(max(bisect_right(points, value) - 1, 0), len(points) - 2)
    return left, (value - points[left]) / (points[left + 1] - points[left])


def _name(rate, warmup, training):
    return json.dumps([rate, warmup, training.lr_scheduler_type])


def recorded(folder, *, parallel=1):
    """Train every point once, and return its validation losses by step.

    Points that `folder` has the curves of are not trained again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kept, texts = folder / "curves.json", folder / "sources.jsonl"
    curves = json.loads(kept.read_text()) if kept.exists() else {}
    write_sources([texts], megabytes=2)
    plain = settings_of(
        ("data.source", [str(texts)]),
        ("data.format", "jsonl"),
        ("data.columns", {}),
        ("data.validation_share", 0.002),
        ("training.load_best_model_at_end", False),
    )
    configs = [
        from_mapping(changed(plain, dict(zip(POINTS, values, strict=True))))
        for values in itertools.product(*POINTS.values())
    ]
    names = [
        _name(config.training.learning_rate, config.training.warmup_steps, config.training)
        for config in configs
    ]
    waiting = [number for number, name in enumerate(names) if name not in curves]
    trials = local_trials(folder / "study", parallel=parallel)
    trials.attach()
    try:
        for start in range(0, len(waiting), parallel):
            numbers = waiting[start : start + parallel]
            for number in numbers:
                trials.train(number, configs[number], plain.training.max_steps)
            for number in numbers:
                wait_for(lambda n=number: trials.state(n).condition != "running", 900)
                state = trials.state(number)
                assert state.condition == "finished", state.error
                losses = {str(item.step): item.metrics["loss"] for item in state.validations}
                curves[names[number]] = losses
                kept.write_text(json.dumps(curves))
                trials.discard(number)
    finally:
        trials.close()
    return curves

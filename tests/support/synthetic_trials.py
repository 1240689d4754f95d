"""Trials that follow a formula instead of training: what a driver sees of them, and nothing else.

A `World` is what is left of trials when their driver dies: files, and processes that train on.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from steadytrain.components.tune.trials.base import TrialState, Validation

SPACE = {
    "training.learning_rate": {"low": 1e-4, "high": 1e-1, "log": True},
    "training.weight_decay": {"low": 0.0, "high": 0.5},
}


def loss(config, step):
    """A loss that falls with the steps, best at learning rate 3e-3 and weight decay 0.1."""
    rate = math.log10(config.training.learning_rate / 3e-3)
    decay = config.training.weight_decay - 0.1
    return 2.0 + rate**2 + decay**2 + 5.0 / (1 + step * (0.5 + abs(rate)))


@dataclass
class World:
    """The trials of one study. Each call of `state` lets a training trial advance.

    pace: validations that pass between two looks; 0 means that a trial is done at once.
    failing: trials that fail, with the class.
    killed_at_end: trials whose processes are killed once after the last step, before they finish.
    latency: the milliseconds of a configuration's model; None if nobody measures them.
    trained: steps that were trained, by trial: each step once, unless something was repeated.
    """

    pace: int = 0
    objective: object = loss
    latency: object = lambda config: None
    failing: dict[int, str] = field(default_factory=dict)
    killed_at_end: set[int] = field(default_factory=set)
    configs: dict[int, object] = field(default_factory=dict)
    reached: dict[int, int] = field(default_factory=dict)
    until: dict[int, int] = field(default_factory=dict)
    curves: dict[int, list] = field(default_factory=dict)
    discarded: set[int] = field(default_factory=set)
    trained: dict[int, list[int]] = field(default_factory=dict)
    most_running: int = 0
    warmed_up: int = 0


class SyntheticTrials:
    """The interface of `components/tune/trials/base.py` over a World."""

    def __init__(self, world, *, orphans_live=False, seed=0):
        self.world, self.orphans_live = world, orphans_live
        self.training = set()
        self.random = random.Random(seed)
        self.closed = False

    def warm_up(self, compute):
        self.world.warmed_up += 1

    def train(self, number, config, until):
        world = self.world
        assert world.configs.setdefault(number, config) == config
        assert number not in world.discarded, f"trial {number} was discarded"
        assert until % config.training.eval_steps == 0 or until == config.training.max_steps
        world.until[number] = until
        if world.reached.setdefault(number, 0) == config.training.max_steps:
            world.killed_at_end.discard(number)
        self.training.add(number)
        world.most_running = max(world.most_running, len(self.training))

    def state(self, number):
        world = self.world
        if number not in world.reached:
            return TrialState("new")
        if number in self.training:
            self._advance(number)
        step = world.reached[number]
        curve = tuple(world.curves.get(number, ()))
        condition = "paused"
        if number in world.failing:
            self.training.discard(number)
            return TrialState("failed", step, curve, step * 0.1, world.failing[number], "broken")
        at_end = step >= world.configs[number].training.max_steps
        if at_end and number not in world.killed_at_end:
            condition = "finished"
        if number in self.training:
            condition = "running" if step < world.until[number] else condition
        if condition != "running":
            self.training.discard(number)
        latency_ms = world.latency(world.configs[number])
        return TrialState(condition, step, curve, step * 0.1, latency_ms=latency_ms)

    def stop(self, number, *, within=None):
        self.training.discard(number)

    def discard(self, number):
        assert number not in self.training
        self.world.discarded.add(number)

    def attach(self):
        alive = {
            number for number, step in self.world.reached.items() if step < self.world.until[number]
        }
        self.training = alive if self.orphans_live else set()
        return frozenset(self.training)

    def close(self, *, within=None):
        self.training.clear()
        self.closed = True

    def _advance(self, number):
        world, config = self.world, self.world.configs[number]
        every, last = config.training.eval_steps, config.training.max_steps
        count = world.pace and self.random.randint(0, world.pace)
        while world.reached[number] < world.until[number] and (count > 0 or not world.pace):
            count -= 1
            step = min(world.reached[number] + every, last)
            world.reached[number] = step
            world.trained.setdefault(number, []).append(step)
            value = world.objective(config, step)
            world.curves.setdefault(number, []).append(Validation(step, {"loss": value}))


class Quiet:
    """A watcher that shows nothing."""

    def resumed(self, study): ...

    def started(self, study, trial): ...

    def ended(self, study, trial): ...

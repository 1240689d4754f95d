"""Rungs: the steps at which trials pause, and which trials may go on.

Promotion is asynchronous successive halving by pausing (Li et al. 2020, "A System for Massively
Parallel Hyperparameter Tuning"): a paused trial may go on as soon as it is among the best
1/reduction_factor of those that reached its rung, however late. Hyperband (Li et al. 2018) starts
trials on several smallest rungs, its brackets.

A study counts in steps of its configuration's own batch size and sequence length. With
`tune.fidelity: steps`, these are every trial's steps. With `tokens`, a trial with a larger batch or
longer sequences takes fewer steps, so that all trials have trained on equally many tokens at a
rung. Their validations move along: a trial's score may be the best of its validations, so each
trial needs as many of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.space import tokens_per_step
from steadytrain.components.tune.trials.base import TrialState


@dataclass(frozen=True)
class Pace:
    """The steps of a trial, and those of its study.

    every: steps of the study between two validations.
    full: steps of the study in a full trial.
    trial_every: steps of the trial between two validations.
    """

    every: int
    full: int
    trial_every: int

    @classmethod
    def of(cls, config: RunConfig, params: Mapping[str, Any]) -> Pace:
        """Return the pace of a trial in the study of a configuration."""
        every, full = config.training.eval_steps, config.training.max_steps
        if config.tune.fidelity == "steps":
            return cls(every, full, every)
        ratio = tokens_per_step(config, {}) / tokens_per_step(config, params)
        return cls(every, full, max(1, round(every * ratio)))

    def trial_step(self, step: int) -> int:
        """Return the step of the trial that belongs to one of the study."""
        return math.ceil(step * self.trial_every / self.every)

    def of_study(self, own: int) -> int:
        """Return the study's last step that a trial has reached after so many steps."""
        return min(self.full, own * self.every // self.trial_every)

    def settings(self) -> dict[str, Any]:
        """Return the fields that differ from the study's configuration, for a trial's own."""
        if self.trial_every == self.every:
            return {}
        return {
            "training.max_steps": self.trial_step(self.full),
            "training.eval_steps": self.trial_every,
        }

    def counted(self, state: TrialState) -> TrialState:
        """Return a trial's state in steps of the study."""
        return replace(
            state,
            step=self.of_study(state.step),
            validations=tuple(
                replace(item, step=self.of_study(item.step)) for item in state.validations
            ),
        )


_HALVINGS: Final = 2
"""Rungs below a full trial, unless the smallest one is set."""
_MEDIAN_CUTS: Final = 10
_MEDIAN_FIRST: Final = 5
"""Trials that a rung lets pass before it has a median."""


@dataclass(frozen=True)
class Rungs:
    """The rungs of a study.

    cuts: optimizer steps, ascending; the last one is a full trial.
    factor: the best 1/factor of the trials at a rung go on.
    brackets: number of brackets. A trial of bracket b has its first rung at cuts[b].
    by_median: whether trials that are not worse than the median go on, and all others end.
    """

    cuts: tuple[int, ...]
    factor: int
    brackets: int = 1
    by_median: bool = False

    @classmethod
    def of(cls, config: RunConfig) -> Rungs:
        """Return the rungs of a study's configuration."""
        tune, full = config.tune, config.training.max_steps
        every, factor = config.training.eval_steps, tune.reduction_factor
        if tune.pruner == "none":
            return cls((full,), factor)
        if tune.pruner == "median":
            pitch = _rounded(_smallest(config) or full / _MEDIAN_CUTS, every)
            return cls((*range(pitch, full, pitch), full), factor, by_median=True)
        smallest = _smallest(config) or full / factor**_HALVINGS
        halvings = max(0, math.floor(math.log(full / smallest, factor) + 1e-9))
        steps = {_rounded(full / factor**count, every) for count in range(1, halvings + 1)}
        cuts = (*sorted(step for step in steps if step < full), full)
        return cls(cuts, factor, brackets=len(cuts) if tune.pruner == "hyperband" else 1)

    @cached_property
    def _pattern(self) -> tuple[int, ...]:
        """The brackets of consecutive trials, repeated: each bracket gets about the same steps."""
        weights = [
            math.ceil(self.brackets / (left + 1) * self.factor**left)
            for left in reversed(range(self.brackets))
        ]
        pattern: list[int] = []
        for length in range(1, sum(weights) + 1):
            owed = [
                weight * length / sum(weights) - pattern.count(bracket)
                for bracket, weight in enumerate(weights)
            ]
            pattern.append(owed.index(max(owed)))
        return tuple(pattern)

    def bracket(self, number: int) -> int:
        """Return the bracket of a trial."""
        return self._pattern[number % len(self._pattern)]

    def most(self, bracket: int, rung: int, trials: int) -> int:
        """Return how many trials of a bracket can reach a rung in a study of so many trials."""
        whole, remainder = divmod(trials, len(self._pattern))
        count = whole * self._pattern.count(bracket) + self._pattern[:remainder].count(bracket)
        for _ in range(bracket, rung):
            count = min(count, self.promoted(count))
        return count

    def passing(self, reached: int) -> int:
        """Return how many of the trials that reached a rung may go on: the best ones."""
        if self.by_median:
            return reached if reached <= _MEDIAN_FIRST else math.ceil(reached / 2)
        return reached // self.factor

    def promoted(self, reached: int) -> int:
        """Return how many go on from a rung in the end: at least one, so that one finishes."""
        return reached if self.by_median else max(1, self.passing(reached))


def _smallest(config: RunConfig) -> float | None:
    """Return the steps of the smallest rung, as far as they are set."""
    tune = config.tune
    if tune.min_tokens is None:
        return tune.min_steps
    return tune.min_tokens / tokens_per_step(config, {})


def _rounded(steps: float, every: int) -> int:
    return math.ceil(steps / every - 1e-9) * every

"""How a trial's own optimizer steps relate to the steps in which its study counts.

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
from typing import Any

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.fidelity import tokens_per_step
from steadytrain.components.tune.trials.base import TrialState


@dataclass(frozen=True)
class Pace:
    """The steps of a trial, and those of its study.

    every: steps of the study between two validations.
    full: steps of the study in a full trial.
    own_every: steps of the trial between two validations.
    """

    every: int
    full: int
    own_every: int

    @classmethod
    def of(cls, config: RunConfig, params: Mapping[str, Any]) -> Pace:
        """Return the pace of a trial in the study of a configuration."""
        every, full = config.training.eval_steps, config.training.max_steps
        if config.tune.fidelity == "steps":
            return cls(every, full, every)
        ratio = tokens_per_step(config, {}) / tokens_per_step(config, params)
        return cls(every, full, max(1, round(every * ratio)))

    def own(self, step: int) -> int:
        """Return the step of the trial that belongs to one of the study."""
        return math.ceil(step * self.own_every / self.every)

    def of_study(self, own: int) -> int:
        """Return the last step of the study that a trial has reached with so many of its own."""
        return min(self.full, own * self.every // self.own_every)

    def settings(self) -> dict[str, Any]:
        """Return the fields that differ from the study's configuration, for a trial's own."""
        if self.own_every == self.every:
            return {}
        return {"training.max_steps": self.own(self.full), "training.eval_steps": self.own_every}

    def counted(self, state: TrialState) -> TrialState:
        """Return a trial's state in steps of the study."""
        return replace(
            state,
            step=self.of_study(state.step),
            validations=tuple(
                replace(item, step=self.of_study(item.step)) for item in state.validations
            ),
        )

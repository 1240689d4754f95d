"""What a study will take: its steps, time and cost, as far as they can be known."""

from __future__ import annotations

from dataclasses import dataclass

from steadytrain.components.tune.rungs import Rungs
from steadytrain.components.tune.study import Study


@dataclass(frozen=True)
class Outlook:
    """What is left of a study.

    trials, steps: still to come. Steps are estimates.
    seconds: of training, over all trials together; None if no trial has trained yet.
    usd: None if the price is unknown as well.
    """

    trials: int
    steps: int
    seconds: float | None
    usd: float | None

    @classmethod
    def of(cls, study: Study) -> Outlook:
        """Return the outlook of a running study, from the speed of its trials so far."""
        budget, history = study.tune.budget, study.history
        left = max(0, budget.trials - len(history.trials))
        steps = expected_steps(study.rungs, budget.trials)
        if budget.steps is not None:
            steps = min(steps, budget.steps)
        steps = max(0, steps - study.steps)
        done = sum(trial.reached for trial in history.trials)
        seconds = history.seconds / done * steps if done else None
        usd = None if seconds is None else study.usd(seconds / 3600)
        return cls(left, steps, seconds, usd)


def expected_steps(rungs: Rungs, trials: int) -> int:
    """Return the optimizer steps of a study if each rung lets through what it should."""
    total = 0
    for bracket in range(rungs.brackets):
        before = 0
        for index in range(bracket, len(rungs.cuts)):
            total += rungs.most(bracket, index, trials) * (rungs.cuts[index] - before)
            before = rungs.cuts[index]
    if not rungs.by_median:
        return total
    # On average, half of the trials end at each rung; the first ones pass.
    total, going, before = 0, float(trials), 0
    for cut in rungs.cuts:
        total += round(going * (cut - before))
        going, before = max(min(going, 5.0), going / 2), cut
    return total

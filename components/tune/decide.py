"""What a study does next: functions of its history alone.

A driver that was killed and started again decides the same, because nothing else counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from steadytrain.components.tune.history import History, Trial

Affordable = Callable[[Trial | None, int], bool]
"""Whether the budget allows a trial (None means a new one) to train until a step."""


@dataclass(frozen=True)
class Next:
    """The next thing to train.

    number: of the trial.
    until: step to train until.
    """

    number: int
    until: int


def next_step(history: History, affordable: Affordable, *, more: bool) -> Next | None:
    """Return what to train next; None if nothing can start until a running trial reports.

    Only a trial that finished can be the best one. So until one has, the budget must allow each
    trial that starts or goes on to finish.

    Args:
        more: whether the sampler has another trial to suggest.
    """
    full, anything_finished = history.rungs.cuts[-1], history.has_finished

    def allowed(trial: Trial | None, until: int) -> bool:
        return affordable(trial, until if anything_finished else full)

    for candidate in _promotions(history):
        if allowed(history.trials[candidate.number], candidate.until):
            return candidate
    number = len(history.trials)
    first = history.rungs.cuts[history.rungs.bracket(number)]
    if more and number < history.limits["trials"] and allowed(None, first):
        return Next(number, first)
    if not history.running:
        for candidate in _last_promotions(history):
            if allowed(history.trials[candidate.number], candidate.until):
                return candidate
    return None


def to_discard(history: History) -> list[int]:
    """Return the paused trials that can never go on, however many trials follow."""
    rungs, found = history.rungs, []
    for (bracket, until), place in history.places.items():
        most = rungs.most(bracket, rungs.cuts.index(until), history.limits["trials"])
        keep = rungs.passing(len(place.reached)) if rungs.by_median else rungs.promoted(most)
        for key in reversed(place.waiting):
            if place.rank(key) < keep:
                break
            found.append(key[1])
    return sorted(found)


def _promotions(history: History) -> Iterator[Next]:
    """Yield the paused trials that may go on, from the highest rung down, the best first."""
    for bracket, index in _places(history):
        place = history.places[bracket, history.rungs.cuts[index]]
        passing = history.rungs.passing(len(place.reached))
        if place.waiting and place.rank(place.waiting[0]) < passing:
            yield Next(place.waiting[0][1], history.rungs.cuts[index + 1])


def _last_promotions(history: History) -> Iterator[Next]:
    """Yield the best trial of each rung that no other went on from, once no others follow.

    So at least one trial of each bracket finishes. A trial that failed later does not count.
    """
    for bracket, index in reversed(list(_places(history))):
        place = history.places[bracket, history.rungs.cuts[index]]
        better = place.reached[: place.rank(place.waiting[0])] if place.waiting else []
        if place.waiting and all(
            history.trials[number].standing == "failed" for _, number in better
        ):
            yield Next(place.waiting[0][1], history.rungs.cuts[index + 1])


def _places(history: History) -> Iterator[tuple[int, int]]:
    """Yield the bracket and the index of each rung below the last one, from the highest down."""
    rungs = history.rungs
    for index in reversed(range(len(rungs.cuts) - 1)):
        for bracket in range(min(index + 1, rungs.brackets)):
            if (bracket, rungs.cuts[index]) in history.places:
                yield bracket, index

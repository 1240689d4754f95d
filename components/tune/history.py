"""What a study's log says: its trials, where each one stands at its rungs, and what comes next.

Everything here is a function of the log alone. So a driver that was killed and started again
decides the same.

The records are:

opened      study (digest of what must stay the same), queued (parameters to try first), config
            (YAML), inputs (digest of the data, if it is known)
budget      limits (as in `tune.budget`)
started     number, params, until
promoted    number, until
reported    number, until, validations ([step, metrics]), seconds, finished, fallbacks, latency_ms
            (if there is a limit), scores (digest of the file with the scores of a held-out fold)
failed      number, failure, error, seconds
discarded   number
skipped     number, params, until, reason: it does not start, until a larger budget allows it
lost        number, reason: what it left is damaged, so that it trains again

Those of a search have `elapsed`, the seconds of wall time that its drivers have worked on it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import ValidationError

from steadytrain.components.shared.append_log import Record
from steadytrain.components.shared.config import TuneConfig
from steadytrain.components.tune.log import RECORDS, damaged
from steadytrain.components.tune.rungs import Rungs

Status = Literal["running", "paused", "finished", "failed", "discarded", "skipped"]
Params = Mapping[str, Any]
Key = tuple[float, int]
"""Sorts trials from best to worst: the score, negated if higher is better, and the number."""


@dataclass(slots=True)
class Trial:
    """One trial.

    until: step that it may train until.
    reached: step of its last report.
    curve: (step, metrics) of each validation.
    scores: the key's score by the rung at which it was reported.
    reason: why it does not start, if it is skipped.
    scored: digest of the file with its scores on a held-out fold; "" if it left none.
    began: wall time of the study when it started, in seconds.
    wall: seconds from then to its end.
    excess_ms: latency above `tune.constraints.latency_ms`; negative below, None if unlimited. A
        trial above the limit is discarded at its first rung, where it counts as the worst.
    """

    number: int
    params: Params
    until: int
    status: Status = "running"
    reached: int = 0
    curve: list[tuple[int, Mapping[str, float]]] = field(default_factory=list)
    scores: dict[int, float] = field(default_factory=dict)
    seconds: float = 0.0
    failure: str = ""
    error: str = ""
    fallbacks: tuple[str, ...] = ()
    reason: str = ""
    scored: str = ""
    began: float = 0.0
    wall: float = 0.0
    excess_ms: float | None = None

    def has_reached(self, cut: int) -> bool:
        """Return whether it has a score at a rung, or ended before it because it was done."""
        return self.reached >= cut or self.status == "finished"

    @property
    def too_slow(self) -> bool:
        """Whether its latency is above the limit."""
        return self.excess_ms is not None and self.excess_ms > 0


@dataclass(slots=True)
class Rung:
    """The trials of one bracket at one rung.

    reached: keys of all that reached it, best first.
    waiting: keys of those that are paused there.
    """

    reached: list[Key] = field(default_factory=list)
    waiting: list[Key] = field(default_factory=list)

    def rank(self, key: Key) -> int:
        """Return how many are better."""
        return bisect_left(self.reached, key)


class History:
    """A study's state: what follows from its records, and nothing else."""

    def __init__(self, tune: TuneConfig, rungs: Rungs, *, best_counts: bool) -> None:
        """Start without records.

        Args:
            best_counts: whether a trial's score is its best so far, and not its last one.
        """
        self.rungs, self.objectives, self._best_counts = rungs, tune.objectives, best_counts
        self._fields = len(tune.space)
        self._latency_ms = tune.constraints.latency_ms
        self.study = self.inputs = ""
        self.queued: Sequence[Params] = ()
        self.limits: Mapping[str, Any] = {}
        self.trials: list[Trial] = []
        self.running: dict[int, Trial] = {}
        self.by_rung: defaultdict[tuple[int, int], Rung] = defaultdict(Rung)
        self.again: list[int] = []
        self.seconds = self.elapsed = 0.0
        self.failed = 0
        self.records = 0

    @property
    def not_started(self) -> int:
        """How many trials were left out, such as those of a search that is out of time."""
        return sum(trial.status == "skipped" for trial in self.trials)

    def apply(self, record: Record) -> None:
        """Add the next record.

        Raises:
            BadInput: it does not follow from the records before it.
        """
        try:
            RECORDS.validate_python(record)
            self.elapsed = max(self.elapsed, record.get("elapsed", 0.0))
            self._take(record)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            why = f"record {self.records} does not follow from those before it"
            raise damaged(f"{why} ({_reason(error)})") from error
        self.records += 1

    def _take(self, record: Record) -> None:
        match record["kind"]:
            case "opened":
                self.study, self.queued = record["study"], tuple(record["queued"])
                self.inputs = record.get("inputs", "")
            case "budget":
                self.limits = record["limits"]
                self.again = [item.number for item in self.trials if item.status == "skipped"]
            case "started" | "skipped":
                self._start(self._new(record), record)
            case "promoted":
                self._promote(self.trials[record["number"]], record["until"])
            case "reported":
                self._report(self.running.pop(record["number"]), record)
            case "failed":
                self._fail(self.running.pop(record["number"]), record)
            case "lost":
                self._lose(self.trials[record["number"]])
            case "discarded":
                self._discard(self.trials[record["number"]])

    def rung_of(self, trial: Trial, until: int) -> Rung:
        """Return a trial's rung at a step."""
        return self.by_rung[self.rungs.bracket(trial.number), until]

    def key(self, trial: Trial, until: int) -> Key:
        """Return a trial's place in the order at a rung that it reached."""
        return trial.scores[until], trial.number

    @property
    def has_finished(self) -> bool:
        """Whether a trial has finished."""
        full = self.rungs.cuts[-1]
        return any((bracket, full) in self.by_rung for bracket in range(self.rungs.brackets))

    @property
    def compared_rung(self) -> int:
        """The rung at which a sampler compares trials.

        That is the highest one that more trials have reached than the space has fields (Falkner et
        al. 2018, "BOHB"), or the lowest one. Scores of different rungs cannot be compared.
        """
        scored = [trial for trial in self.trials if trial.scores and trial.status != "failed"]
        for cut in reversed(self.rungs.cuts):
            if sum(trial.has_reached(cut) for trial in scored) > self._fields:
                return cut
        return self.rungs.cuts[0]

    def value(self, trial: Trial, metric: str, *, highest: bool, until: float = math.inf) -> float:
        """Return a metric's value for a trial, at the end or at a step; NaN if it has none.

        That is the value of the model that its run would export.
        """
        values = [metrics.get(metric, math.nan) for step, metrics in trial.curve if step <= until]
        finite = [value for value in values if not math.isnan(value)]
        if not finite or math.isnan(values[-1]):
            return math.nan
        if not self._best_counts:
            return values[-1]
        return max(finite) if highest else min(finite)

    def values(self, trial: Trial, until: float = math.inf) -> list[float]:
        """Return a trial's value of each objective, at the end or at a step."""
        return [
            self.value(trial, item.metric, highest=item.direction == "maximize", until=until)
            for item in self.objectives
        ]

    @property
    def next_number(self) -> int:
        """The number of the next trial that starts: one that was skipped before comes first."""
        return self.again[0] if self.again else len(self.trials)

    def _new(self, record: Record) -> Trial:
        if record["number"] != self.next_number:
            raise ValueError(f"trial {record['number']} instead of {self.next_number}")
        trial = Trial(record["number"], record["params"], record["until"], began=self.elapsed)
        if self.again:
            self.trials[self.again.pop(0)] = trial
        else:
            self.trials.append(trial)
        return trial

    def _start(self, trial: Trial, record: Record) -> None:
        if record["kind"] == "skipped":
            trial.status, trial.reason = "skipped", record["reason"]
        else:
            self.running[trial.number] = trial

    def _promote(self, trial: Trial, until: int) -> None:
        self.rung_of(trial, trial.until).waiting.remove(self.key(trial, trial.until))
        trial.status, trial.until = "running", until
        self.running[trial.number] = trial

    def _report(self, trial: Trial, record: Record) -> None:
        done = trial.curve[-1][0] if trial.curve else 0
        trial.curve += [(step, metrics) for step, metrics in record["validations"] if step > done]
        trial.reached = trial.until if not record["finished"] else record["step"]
        trial.fallbacks, trial.scored = tuple(record["fallbacks"]), record.get("scores", "")
        self._spend(trial, record)
        if self._latency_ms is not None and "latency_ms" in record:
            trial.excess_ms = record["latency_ms"] - self._latency_ms
        value = self.values(trial)[0]
        worse = self.objectives[0].direction == "maximize"
        score = math.inf if math.isnan(value) else -value if worse else value
        trial.scores[trial.until] = score
        rung = self.rung_of(trial, trial.until)
        insort(rung.reached, (math.inf if trial.too_slow else score, trial.number))
        if trial.too_slow:
            trial.status = "discarded"
        elif record["finished"]:
            trial.status = "finished"
        else:
            trial.status = "paused"
            insort(rung.waiting, (score, trial.number))

    def _fail(self, trial: Trial, record: Record) -> None:
        trial.status, trial.failure, trial.error = "failed", record["failure"], record["error"]
        self._spend(trial, record)
        self.failed += 1

    def _discard(self, trial: Trial) -> None:
        self.rung_of(trial, trial.until).waiting.remove(self.key(trial, trial.until))
        trial.status = "discarded"

    def _lose(self, trial: Trial) -> None:
        if trial.status != "finished":
            raise ValueError(f"trial {trial.number} has not finished")
        self.rung_of(trial, trial.until).reached.remove(self.key(trial, trial.until))
        del trial.scores[trial.until]
        trial.status, trial.reached, trial.curve, trial.scored = "running", 0, [], ""
        trial.seconds, trial.began, trial.wall = 0.0, self.elapsed, 0.0
        self.running[trial.number] = trial

    def _spend(self, trial: Trial, record: Record) -> None:
        self.seconds += max(0.0, record["seconds"] - trial.seconds)
        trial.seconds = max(trial.seconds, record["seconds"])
        trial.wall = self.elapsed - trial.began


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return f"{type(error).__name__}: {error}"


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
    number = history.next_number
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
    rungs, numbers = history.rungs, []
    for (bracket, until), rung in history.by_rung.items():
        most = rungs.most(bracket, rungs.cuts.index(until), history.limits["trials"])
        keep = rungs.passing(len(rung.reached)) if rungs.by_median else rungs.promoted(most)
        for key in reversed(rung.waiting):
            if rung.rank(key) < keep:
                break
            numbers.append(key[1])
    return sorted(numbers)


def _promotions(history: History) -> Iterator[Next]:
    """Yield the paused trials that may go on, from the highest rung down, the best first."""
    for bracket, index in _rungs(history):
        rung = history.by_rung[bracket, history.rungs.cuts[index]]
        passing = history.rungs.passing(len(rung.reached))
        if rung.waiting and rung.rank(rung.waiting[0]) < passing:
            yield Next(rung.waiting[0][1], history.rungs.cuts[index + 1])


def _last_promotions(history: History) -> Iterator[Next]:
    """Yield the best trial of each rung that no other went on from, once no others follow.

    So at least one trial of each bracket finishes. A trial that failed later does not count.
    """
    for bracket, index in reversed(list(_rungs(history))):
        rung = history.by_rung[bracket, history.rungs.cuts[index]]
        better = rung.reached[: rung.rank(rung.waiting[0])] if rung.waiting else []
        if rung.waiting and all(history.trials[number].status == "failed" for _, number in better):
            yield Next(rung.waiting[0][1], history.rungs.cuts[index + 1])


def _rungs(history: History) -> Iterator[tuple[int, int]]:
    """Yield the bracket and the index of each rung below the last one, from the highest down."""
    rungs = history.rungs
    for index in reversed(range(len(rungs.cuts) - 1)):
        for bracket in range(min(index + 1, rungs.brackets)):
            if (bracket, rungs.cuts[index]) in history.by_rung:
                yield bracket, index

"""Decide whether the candidate becomes champion: a pure function of scores and limits.

The candidate must be better than the champion, the naive baseline and model.base by more than the
margin, at the lower end of an interval. Both models of a comparison are measured on the same
examples, so what makes an example hard for both cancels out.
The candidate must also meet every absolute floor, and must not be worse in a slice than allowed.
With too few independent examples, the gate leaves the candidate undecided. If any of these numbers
is NaN or infinite, the candidate is not promoted.

With many attempts, one is better by chance. The probability of a wrong promotion is therefore
divided by the number of configurations that a search compared (Bonferroni), and spent over the
models that are judged on the same test records: the k-th one gets 1 / (k (k + 1)) of it, which
adds up to 1 however many follow.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from steadytrain.components.evaluate.bootstrap import (
    FloatArray,
    IntArray,
    count_units,
    fewest_units,
    infinite_for_one,
    studentized_ratio,
)
from steadytrain.components.evaluate.metric import Pair, Resampled, Rival
from steadytrain.components.shared.config.evaluation import GateConfig
from steadytrain.components.shared.records import Comparison, GateRecord, Interval, Subject

_NOT_FINITE: Final = (
    "the comparison gives no finite number, or is undefined without one of the test examples"
)


@dataclass(frozen=True)
class TestSide:
    """What the gate knows about the test records.

    units: (examples,), the unit of each example. Units count as a whole, negative ones not at all.
    digest: of the ids of the test side.
    earlier: number of other models that were judged on the same records before.
    grows_by: how a run gets more of it.
    called: what the units are, in the plural.
    """

    __test__ = False

    units: IntArray
    digest: str = ""
    earlier: int = 0
    grows_by: str = "data.test_share, evaluation.max_examples"
    called: str = "independent test examples"


@dataclass(frozen=True)
class Gate:
    """The limits, the metric to compare models by, and what the decision is about.

    confidence: level of the intervals for a single comparison.
    directions: by metric, whether greater is better.
    test: the test records.
    parts: slices in which the candidate must be shown not to be worse than allowed.
    base_not_compared: why the candidate is not compared with model.base; "" if it is.
    """

    subject: Subject
    limits: GateConfig
    metric: str
    confidence: float
    directions: Mapping[str, bool]
    test: TestSide
    parts: Collection[str] = ()
    base_not_compared: str = ""

    @property
    def level(self) -> float:
        """The level of each interval, corrected for the number of comparisons."""
        looks = self.test.earlier + 1
        return 1 - (1 - self.confidence) / (self.limits.compared * looks * (looks + 1))

    def decide(
        self, metrics: Mapping[str, float], pair: Pair | None, rivals: Sequence[Rival] = ()
    ) -> GateRecord:
        """Decide whether the candidate becomes champion.

        Args:
            metrics: the candidate's metrics, for the floors.
            pair: None if there is no champion yet.
            rivals: other models that the candidate must beat, on the test records.
        """
        broken = self._broken(metrics)
        if broken:
            return self.refuse(metrics, broken, pair.version if pair else None)
        # Overflow gives a result that is not finite, and `_compare` checks for that.
        with np.errstate(all="ignore"):
            return self._compare(metrics, pair, rivals)

    def _compare(
        self, metrics: Mapping[str, float], pair: Pair | None, rivals: Sequence[Rival]
    ) -> GateRecord:
        floors, version = list(self._missed_floors(metrics)), pair.version if pair else None
        few = self._too_few(pair)
        if few:
            return self._record(
                metrics,
                [few, *floors],
                _show(self.metric, metrics),
                undecided=not floors,
                champion_version=version,
            )
        beaten = [self._against(rival) for rival in rivals]
        finite = [end for item in beaten for end in (item.other, *_ends(item.improvement))]
        if not np.isfinite(finite).all():
            return self.refuse(metrics, _NOT_FINITE, version)
        objections = [*floors, *self._not_beaten(beaten)]
        if pair is None:
            return self._record(
                metrics,
                objections,
                f"{_show(self.metric, metrics)}{self._beyond(beaten)}, and there is no champion "
                "yet",
                comparisons=beaten,
            )
        improvement = self._improvement(pair, np.ones(len(pair.units)))
        slices = self._slice_improvements(pair)
        champion = float(pair.champion(np.ones((1, len(pair.units))))[0])
        compared = (champion, *_ends(improvement), *slices.values())
        if not np.isfinite(compared).all():
            return self.refuse(metrics, _NOT_FINITE, version)
        objections = [
            *self._too_small(improvement),
            *objections,
            *(self._inferior_parts(pair) if self.parts else self._regressions(slices)),
        ]
        return self._record(
            metrics,
            objections,
            f"{_show(self.metric, metrics)} against {champion:.4g} of version {pair.version}, "
            f"{self._shown(improvement)}",
            champion=champion,
            champion_version=pair.version,
            champion_weights=pair.digest,
            improvement=improvement,
            slices=slices,
            comparisons=beaten,
        )

    def refuse(
        self, metrics: Mapping[str, float], reason: str, version: str | None = None
    ) -> GateRecord:
        """Return the decision not to promote, because a fair comparison is not possible."""
        return self._record(
            metrics, [reason], _show(self.metric, metrics), champion_version=version
        )

    def _record(
        self,
        metrics: Mapping[str, float],
        objections: list[str],
        comparison: str,
        *,
        undecided: bool = False,
        champion: float | None = None,
        champion_version: str | None = None,
        champion_weights: str = "",
        improvement: Interval | None = None,
        slices: Mapping[str, float] | None = None,
        comparisons: Sequence[Comparison] = (),
    ) -> GateRecord:
        verdict = "not promoted" if objections else "promoted"
        because = f", but {' and '.join(objections)}" if objections else ""
        return GateRecord(
            subject=self.subject,
            promoted=not objections,
            undecided=undecided,
            reason=f"{'undecided' if undecided else verdict}: {comparison}{because}",
            metric=self.metric,
            greater_is_better=self._sign(self.metric) > 0,
            candidate=metrics[self.metric],
            champion=champion,
            champion_version=champion_version,
            champion_weights=champion_weights,
            improvement=improvement,
            margin=self.limits.margin,
            floors=self.limits.floors,
            slices=dict(slices or {}),
            compared=self.limits.compared,
            earlier=self.test.earlier,
            confidence=self.level,
            units=self._units(None),
            test_digest=self.test.digest,
            comparisons=list(comparisons),
            base_not_compared=self.base_not_compared,
        )

    def _sign(self, metric: str) -> int:
        return 1 if self.directions[metric] else -1

    def _broken(self, metrics: Mapping[str, float]) -> str:
        """Return which number makes a decision impossible, or "" if all are usable."""
        limits = [self.limits.margin, self.limits.max_slice_regression or 0.0]
        if not np.isfinite([*limits, *self.limits.floors.values()]).all():
            return "a limit of the gate is not finite"
        for name in (self.metric, *self.limits.floors):
            if name in metrics and not math.isfinite(metrics[name]):
                return f"its {_plain(name)} is not finite"
        return ""

    def _units(self, pair: Pair | None) -> int:
        """Return the number of independent examples of the smallest comparison."""
        counted = [self.test.units, *([pair.units] if pair else [])]
        return min(map(count_units, counted))

    def _too_few(self, pair: Pair | None) -> str:
        units = self._units(pair)
        needed = max(self.limits.min_units, fewest_units(self.level))
        if units >= needed:
            return ""
        return (
            f"{units} {self.test.called} are too few to tell ({needed} needed): give more test "
            f"data ({self.test.grows_by})"
        )

    def _relative(
        self, metric: str, mine: Resampled, other: Resampled, weights: FloatArray
    ) -> FloatArray:
        """Compute the improvement relative to the other model; absolute if its metric is 0.

        Returns:
            (rows,); NaN if there is nothing to measure for either model, such as examples of only
            one class, and infinite if that is so for one of them.
        """
        candidate, champion = mine(weights), other(weights)
        # A negative value of the other model must not flip the sign.
        scale = np.where(champion == 0, 1.0, np.abs(champion))
        difference: FloatArray = self._sign(metric) * (candidate - champion) / scale
        return infinite_for_one(candidate, champion, difference)

    def _interval(
        self, metric: str, mine: Resampled, other: Resampled, units: IntArray, inside: FloatArray
    ) -> Interval:
        """Return the improvement with its interval.

        Args:
            inside: (examples,), 1 for the examples that count and 0 for the others.
        """
        kept = np.flatnonzero(inside)
        known = float(other(inside[None])[0])

        def parts(weights: FloatArray) -> dict[str, FloatArray]:
            all_weights = np.zeros((len(weights), len(inside)))
            all_weights[:, kept] = weights
            one, two = mine(all_weights), other(all_weights)
            gain = infinite_for_one(one, two, self._sign(metric) * (one - two))
            return {"gain": gain, "scale": np.sign(known) * two if known else np.ones(len(two))}

        return studentized_ratio(parts, units[kept], self.level)

    def _improvement(self, pair: Pair, inside: FloatArray) -> Interval:
        return self._interval(self.metric, pair.candidate, pair.champion, pair.units, inside)

    def _against(self, rival: Rival) -> Comparison:
        units = self.test.units
        inside = np.ones(len(units))
        bound = self._interval(rival.metric, rival.candidate, rival.rival, units, inside)
        return Comparison(
            what=rival.what,
            metric=rival.metric,
            candidate=float(rival.candidate(inside[None])[0]),
            other=float(rival.rival(inside[None])[0]),
            improvement=bound,
        )

    def _slice_improvements(self, pair: Pair) -> dict[str, float]:
        result = {}
        for name, rows in pair.slices.items():
            inside = np.zeros((1, len(pair.units)))
            inside[0, rows] = 1
            relative = float(self._relative(self.metric, pair.candidate, pair.champion, inside)[0])
            if len(rows) >= self.limits.min_slice_examples and not math.isnan(relative):
                result[name] = relative
        return result

    def _exceeds(self, improvement: Interval) -> bool:
        return min(improvement.value, improvement.low) > self.limits.margin

    def _too_small(self, improvement: Interval) -> Iterator[str]:
        if not self._exceeds(improvement):
            yield "the interval's lower end does not exceed the margin"

    def _not_beaten(self, comparisons: Sequence[Comparison]) -> Iterator[str]:
        for item in comparisons:
            if not self._exceeds(item.improvement):
                yield (
                    f"it is not shown to be better than {item.what}: {_plain(item.metric)} "
                    f"{item.candidate:.4g} against {item.other:.4g}, "
                    f"{self._shown(item.improvement)}"
                )

    def _beyond(self, comparisons: Sequence[Comparison]) -> str:
        """Say how much better than the others the candidate is, where it is better."""
        return "".join(
            f", {_better(item.improvement.value)} than {item.what}"
            for item in comparisons
            if self._exceeds(item.improvement)
        )

    def _shown(self, improvement: Interval) -> str:
        return (
            f"{_better(improvement.value)} ({100 * self.level:.4g} % interval "
            f"{100 * improvement.low:.1f} to {100 * improvement.high:.1f} %, "
            f"margin {100 * self.limits.margin:g} %)"
        )

    def _missed_floors(self, metrics: Mapping[str, float]) -> Iterator[str]:
        for name, floor in self.limits.floors.items():
            if name not in metrics or name not in self.directions:
                yield f"{_plain(name)} has a floor of {floor:g} and is not measured here"
            elif self.directions[name] and not metrics[name] >= floor:
                yield f"{_show(name, metrics)} is below its floor {floor:g}"
            elif not self.directions[name] and not metrics[name] <= floor:
                yield f"{_show(name, metrics)} is above its limit {floor:g}"

    def _inferior_parts(self, pair: Pair) -> Iterator[str]:
        """Yield each part in which the candidate is not shown to be as good (non-inferiority)."""
        allowed, needed = self.limits.max_slice_regression or 0.0, self.limits.min_slice_examples
        for name in sorted(self.parts):
            rows = pair.slices.get(name, np.empty(0, dtype=np.int64))
            if len(rows) < needed:
                yield (
                    f"part {name!r} has {len(rows)} test examples, too few to tell "
                    f"({needed} needed)"
                )
                continue
            inside = np.zeros(len(pair.units))
            inside[rows] = 1
            improvement = self._improvement(pair, inside)
            if not improvement.low >= -allowed:
                yield (
                    f"part {name!r} is {_better(improvement.value)}, with an interval from "
                    f"{100 * improvement.low:.1f} % (limit {-100 * allowed:g} %)"
                )

    def _regressions(self, slices: Mapping[str, float]) -> Iterator[str]:
        allowed = self.limits.max_slice_regression
        if allowed is None:
            return
        for name, improvement in slices.items():
            if not improvement >= -allowed:
                yield f"slice {name!r} is {_better(improvement)} (limit {100 * allowed:g} %)"


def _better(improvement: float) -> str:
    return f"{abs(100 * improvement):.1f} % {'better' if improvement >= 0 else 'worse'}"


def _show(name: str, metrics: Mapping[str, float]) -> str:
    return f"{_plain(name)} {metrics[name]:.4g}"


def _plain(name: str) -> str:
    return name.replace("_", " ")


def _ends(interval: Interval) -> tuple[float, float, float]:
    return interval.value, interval.low, interval.high

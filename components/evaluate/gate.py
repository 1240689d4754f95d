"""Decide whether the candidate becomes champion: a pure function of scores and limits.

The candidate must be better than the champion by more than the margin, at the lower end of a paired
bootstrap interval. In each resample both models are measured on the same examples, so what makes an
example hard for both cancels out. The candidate must also meet every absolute floor, and must not
be worse in a slice than allowed. If any of these numbers is NaN or infinite, the candidate is not
promoted.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from steadytrain.components.evaluate.bootstrap import FloatArray, Resampling, replicate
from steadytrain.components.evaluate.pairs import Pair
from steadytrain.components.shared.config.evaluation import GateConfig
from steadytrain.components.shared.records import GateRecord, Interval, Subject


@dataclass(frozen=True)
class Gate:
    """The limits, the metric to compare models by, and what the decision is about.

    directions: by metric, whether greater is better.
    parts: slices in which the candidate must be shown not to be worse than allowed.
    """

    subject: Subject
    limits: GateConfig
    metric: str
    how: Resampling
    directions: Mapping[str, bool]
    parts: Collection[str] = ()

    def decide(self, metrics: Mapping[str, float], pair: Pair | None) -> GateRecord:
        """Decide whether the candidate becomes champion.

        Args:
            metrics: the candidate's metrics, for the floors.
            pair: None if there is no champion yet. Then the floors alone decide.
        """
        broken = self._broken(metrics)
        if broken:
            return self.refuse(metrics, broken, pair.version if pair else None)
        # Overflow gives a result that is not finite, and `_compare` checks for that.
        with np.errstate(all="ignore"):
            return self._compare(metrics, pair)

    def _compare(self, metrics: Mapping[str, float], pair: Pair | None) -> GateRecord:
        objections = list(self._missed_floors(metrics))
        if pair is None:
            return self._record(
                metrics, objections, f"{_show(self.metric, metrics)}, and there is no champion yet"
            )
        improvement = self._improvement(pair, np.ones(len(pair.units)))
        slices = self._slice_improvements(pair)
        champion = float(pair.champion(np.ones((1, len(pair.units))))[0])
        compared = (champion, improvement.value, improvement.low, improvement.high)
        if not np.isfinite([*compared, *slices.values()]).all():
            return self.refuse(metrics, "the comparison gives no finite number", pair.version)
        objections = [
            *self._too_small(pair, improvement),
            *objections,
            *(self._inferior_parts(pair) if self.parts else self._regressions(slices)),
        ]
        comparison = (
            f"{_show(self.metric, metrics)} against {champion:.4g} of version {pair.version}, "
            f"{_better(improvement.value)} ({100 * self.how.confidence:g} % interval "
            f"{100 * improvement.low:.1f} to {100 * improvement.high:.1f} %, "
            f"margin {100 * self.limits.margin:g} %)"
        )
        return self._record(
            metrics,
            objections,
            comparison,
            champion=champion,
            champion_version=pair.version,
            champion_weights=pair.digest,
            improvement=improvement,
            slices=slices,
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
        champion: float | None = None,
        champion_version: str | None = None,
        champion_weights: str = "",
        improvement: Interval | None = None,
        slices: Mapping[str, float] | None = None,
    ) -> GateRecord:
        verdict = "not promoted" if objections else "promoted"
        because = f", but {' and '.join(objections)}" if objections else ""
        return GateRecord(
            subject=self.subject,
            promoted=not objections,
            reason=f"{verdict}: {comparison}{because}",
            metric=self.metric,
            greater_is_better=self._sign > 0,
            candidate=metrics[self.metric],
            champion=champion,
            champion_version=champion_version,
            champion_weights=champion_weights,
            improvement=improvement,
            margin=self.limits.margin,
            floors=self.limits.floors,
            slices=dict(slices or {}),
            compared=self.limits.compared,
        )

    @property
    def _sign(self) -> int:
        return 1 if self.directions[self.metric] else -1

    def _broken(self, metrics: Mapping[str, float]) -> str:
        """Return which number makes a decision impossible, or "" if all are usable."""
        limits = [self.limits.margin, self.limits.max_slice_regression or 0.0]
        if not np.isfinite([*limits, *self.limits.floors.values()]).all():
            return "a limit of the gate is not finite"
        for name in (self.metric, *self.limits.floors):
            if name in metrics and not math.isfinite(metrics[name]):
                return f"its {_plain(name)} is not finite"
        return ""

    def _relative(self, pair: Pair, weights: FloatArray) -> dict[str, FloatArray]:
        """Compute the improvement relative to the champion; absolute if the champion's metric is 0.

        Returns:
            "improvement" (resamples,), and "undefined" (resamples,): 1 if a resample has nothing to
            measure for either model, such as examples of only one class.
        """
        candidate, champion = pair.candidate(weights), pair.champion(weights)
        # A negative champion value must not flip the sign.
        scale = np.where(champion == 0, 1.0, np.abs(champion))
        return {
            "improvement": self._sign * (candidate - champion) / scale,
            "undefined": (np.isnan(candidate) & np.isnan(champion)).astype(np.float64),
        }

    def _improvement(self, pair: Pair, inside: FloatArray) -> Interval:
        """Return the improvement with its interval.

        Args:
            inside: (examples,), 1 for the examples that count and 0 for the others.
        """
        value = float(self._relative(pair, inside[None])["improvement"][0])
        resampled = replicate(
            lambda weights: self._relative(pair, weights * inside), pair.units, self.how
        )
        # `interval` would drop values that are not finite, but they count against the candidate.
        defined = resampled["improvement"][resampled["undefined"] == 0]
        if not len(defined) or not np.isfinite(defined).all():
            return Interval(value=value, low=math.nan, high=math.nan)
        return self.how.interval(value, defined)

    def _slice_improvements(self, pair: Pair) -> dict[str, float]:
        found = {}
        for name, rows in pair.slices.items():
            inside = np.zeros((1, len(pair.units)))
            inside[0, rows] = 1
            relative = self._relative(pair, inside)
            if len(rows) >= self.limits.min_slice_examples and not relative["undefined"][0]:
                found[name] = float(relative["improvement"][0])
        return found

    def _too_small(self, pair: Pair, improvement: Interval) -> Iterator[str]:
        units = len(np.unique(pair.units))
        needed = self.how.fewest_units
        if units < needed:
            yield f"{units} independent test examples are too few to tell ({needed} needed)"
        elif not min(improvement.value, improvement.low) > self.limits.margin:
            yield "the interval's lower end does not exceed the margin"

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
            found = self._improvement(pair, inside)
            if not found.low >= -allowed:
                yield (
                    f"part {name!r} is {_better(found.value)}, with an interval from "
                    f"{100 * found.low:.1f} % (limit {-100 * allowed:g} %)"
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

"""Whether the candidate becomes champion: a pure function of scores and limits.

The candidate must be better than the champion by more than the margin, at the
lower end of a paired bootstrap interval: in each resample both models are
measured on the same examples, so that what makes an example hard for both
cancels out. It must also hold every absolute floor, and must not be worse in a
slice than allowed. Where any number of this is NaN or infinite, it is not promoted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from steadytrain.components.evaluate.bootstrap import FloatArray, IntArray, Resampling, replicate
from steadytrain.components.shared.config.judging import GREATER_IS_BETTER, GateConfig
from steadytrain.components.shared.records import GateRecord, Interval, Subject


@dataclass(frozen=True)
class Pair:
    """Candidate and champion on the same examples, in the same order.

    The metric of each is the sum of its numerators over the sum of the weights.

    version, digest: the champion's number and the digest of its weights.
    candidate, champion, weights: (examples,). units: (examples,), what is
    resampled as a whole. slices: rows of each slice value.
    """

    version: str
    digest: str
    candidate: FloatArray
    champion: FloatArray
    weights: FloatArray
    units: IntArray
    slices: Mapping[str, IntArray]


@dataclass(frozen=True)
class Gate:
    """The limits, the metric that models are compared by, and what the decision is about."""

    subject: Subject
    limits: GateConfig
    metric: str
    how: Resampling

    def decide(self, metrics: Mapping[str, float], pair: Pair | None) -> GateRecord:
        """Decides.

        Args:
            metrics: the candidate's, for the floors.
            pair: none where there is no champion yet: the floors alone decide.
        """
        broken = self._broken(metrics, pair)
        if broken:
            return self.refuse(metrics, broken, pair.version if pair else None)
        # What overflows is found by its result, which is not finite.
        with np.errstate(all="ignore"):
            return self._compare(metrics, pair)

    def _compare(self, metrics: Mapping[str, float], pair: Pair | None) -> GateRecord:
        objections = list(self._missed_floors(metrics))
        if pair is None:
            return self._record(
                metrics, objections, f"{_show(self.metric, metrics)}, and there is no champion yet"
            )
        improvement = self._improvement(pair)
        slices = self._slice_improvements(pair)
        champion = float(pair.champion.sum() / pair.weights.sum())
        compared = (champion, improvement.value, improvement.low, improvement.high)
        if not np.isfinite([*compared, *slices.values()]).all():
            return self.refuse(metrics, "the comparison gives no finite number", pair.version)
        objections = [
            *self._too_small(pair, improvement),
            *objections,
            *self._regressions(slices),
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
        """Not promoted, because there is no fair comparison."""
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
        )

    @property
    def _sign(self) -> int:
        return 1 if GREATER_IS_BETTER[self.metric] else -1

    def _broken(self, metrics: Mapping[str, float], pair: Pair | None) -> str:
        """Which numbers nothing can be decided by; "" where all can be used."""
        limits = [self.limits.margin, self.limits.max_slice_regression or 0.0]
        if not np.isfinite([*limits, *self.limits.floors.values()]).all():
            return "a limit of the gate is not finite"
        for name in (self.metric, *self.limits.floors):
            if name in metrics and not math.isfinite(metrics[name]):
                return f"its {_plain(name)} is not finite"
        if pair is None:
            return ""
        if not np.isfinite([pair.candidate, pair.champion, pair.weights]).all():
            return "some scores are not finite"
        if (pair.weights < 0).any() or not pair.weights.any():
            return "the test examples have no weight"
        return ""

    def _relative(self, pair: Pair, weights: FloatArray) -> FloatArray:
        """Improvement over the champion (resamples,), relative to it; absolute where it is 0.

        NaN where a resample has no weight.
        """
        total = weights @ pair.weights
        candidate = weights @ pair.candidate / total
        champion = weights @ pair.champion / total
        # A negative champion must not turn the sign.
        scale = np.where(champion == 0, 1.0, np.abs(champion))
        improvement: FloatArray = self._sign * (candidate - champion) / scale
        return improvement

    def _improvement(self, pair: Pair) -> Interval:
        value = self._relative(pair, np.ones((1, len(pair.weights))))[0]
        resampled = replicate(
            lambda weights: {
                "improvement": self._relative(pair, weights),
                "weight": weights @ pair.weights,
            },
            pair.units,
            self.how,
        )
        # The interval leaves out what is not finite, which would be what speaks against it.
        defined = resampled["improvement"][resampled["weight"] > 0]
        if not np.isfinite(defined).all():
            return Interval(value=value, low=math.nan, high=math.nan)
        return self.how.interval(float(value), defined)

    def _slice_improvements(self, pair: Pair) -> dict[str, float]:
        found = {}
        for name, rows in pair.slices.items():
            inside = np.zeros((1, len(pair.weights)))
            inside[0, rows] = 1
            if len(rows) >= self.limits.min_slice_examples and (inside @ pair.weights)[0] > 0:
                found[name] = float(self._relative(pair, inside)[0])
        return found

    def _too_small(self, pair: Pair, improvement: Interval) -> Iterator[str]:
        units = len(np.unique(pair.units))
        # With fewer, all of them favouring the candidate is no rare chance: a
        # sign test could not reach this confidence.
        needed = math.ceil(math.log2(2 / (1 - self.how.confidence)))
        if units < needed:
            yield f"{units} independent test examples are too few to tell ({needed} needed)"
        elif not min(improvement.value, improvement.low) > self.limits.margin:
            yield "the interval's lower end does not exceed the margin"

    def _missed_floors(self, metrics: Mapping[str, float]) -> Iterator[str]:
        for name, floor in self.limits.floors.items():
            if name not in metrics:
                yield f"{_plain(name)} has a floor of {floor:g} and is not measured here"
            elif GREATER_IS_BETTER[name] and not metrics[name] >= floor:
                yield f"{_show(name, metrics)} is below its floor {floor:g}"
            elif not GREATER_IS_BETTER[name] and not metrics[name] <= floor:
                yield f"{_show(name, metrics)} is above its limit {floor:g}"

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

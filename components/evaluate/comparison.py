"""The candidate against the registry's champion, which is scored anew on the same records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from steadytrain.components.evaluate.bootstrap import Resampling
from steadytrain.components.evaluate.gate import Gate, Pair
from steadytrain.components.evaluate.metrics import Scores
from steadytrain.components.evaluate.scoring import Report, place, score
from steadytrain.components.register.verdict import decided_about
from steadytrain.components.register.versions import (
    LABELS,
    RUN,
    SPLIT,
    TASK,
    WEIGHTS,
    Version,
    comparable_tags,
)
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.records import DataRecord, EvaluationRecord, GateRecord

_OTHER_SPLIT: Final = (
    "the model that it started from (model.base) was trained on another split, so that it may have "
    "seen these records; give this run that one's data.split_salt, data.validation_share, "
    "data.test_share and data.columns.group, or start from another model"
)


@dataclass(frozen=True)
class Candidate:
    """The candidate as it has been evaluated.

    records: what it was scored on. scores: of those records, in their order.
    """

    config: RunConfig
    data: DataRecord
    task: Any
    weights_digest: str
    evaluation: EvaluationRecord
    records: pa.Table
    scores: Scores

    def registered_as(self, version: Version) -> bool:
        """Whether this run has registered it, with these weights."""
        tags = version.tags
        return tags.get(RUN) == self.config.run_id and tags.get(WEIGHTS) == self.weights_digest

    def against(self, champion: Version | None, report: Report) -> GateRecord:
        """The gate's decision. A champion that cannot be compared fairly is not replaced.

        Args:
            report: told how many records the champion has been scored on.
        """
        values = {name: item.value for name, item in self.evaluation.metrics.items()}
        subject = decided_about(self.config, self.evaluation.weights_digest)
        gate = Gate(subject, self.config.gate, self.scores.metric, resampling(self.config))
        if set(self.evaluation.splits) - {self.data.split_digest}:
            return gate.refuse(values, _OTHER_SPLIT, champion.number if champion else None)
        if champion is None:
            return gate.decide(values, None)
        refusal = self._unlike(champion)
        if refusal:
            return gate.refuse(values, refusal, champion.number)
        try:
            components = place(self.task.load_logged(champion.uri), self.config)
            theirs = Scores.of(score(self.task, components, self.records, report))
        except Exception as error:
            # Whatever it is that a foreign model raises, the candidate is not to blame.
            said = redact(str(error).strip().partition("\n")[0]) or type(error).__name__
            return gate.refuse(
                values,
                f"the champion, version {champion.number}, does not load or score: {said}",
                champion.number,
            )
        pair = self._pair(champion, theirs)
        if isinstance(pair, str):
            return gate.refuse(values, pair, champion.number)
        return gate.decide(values, pair)

    def _unlike(self, champion: Version) -> str:
        """Why the two may not be compared; "" where they may."""
        who = f"the champion, version {champion.number},"
        if champion.tags.get(WEIGHTS) == self.weights_digest:
            return f"{who} is this very model"
        differences = {
            TASK: f"{who} is of another task",
            SPLIT: f"{who} was trained on another split, so that it may have seen these records",
            LABELS: f"{who} has other labels",
        }
        for tag, mine in comparable_tags(self.config, self.data).items():
            if champion.tags.get(tag) is None:
                return f"{who} does not tell its {tag.partition('.')[2].replace('_', ' ')}"
            if champion.tags[tag] != mine:
                return differences[tag]
        return ""

    def _pair(self, champion: Version, theirs: Scores) -> Pair | str:
        metric = self.scores.metric
        candidate, weights = self.scores.parts(metric)
        other, their_weights = theirs.parts(metric)
        who = f"the champion, version {champion.number},"
        if theirs.id != self.scores.id:
            return f"{who} was scored on other records"
        if theirs.metric != metric or not np.array_equal(weights, their_weights):
            return f"{who} was scored on other spans"
        if not np.isfinite(other).all():
            return f"{who} gives losses that are not finite"
        return Pair(
            version=champion.number,
            digest=champion.tags.get(WEIGHTS, ""),
            candidate=candidate,
            champion=other,
            weights=weights,
            units=self.scores.units,
            slices=self.scores.by_slice(),
        )


def resampling(config: RunConfig) -> Resampling:
    """How the run's intervals are drawn."""
    return Resampling(
        config.evaluation.bootstrap_samples, config.evaluation.confidence, config.training.seed
    )

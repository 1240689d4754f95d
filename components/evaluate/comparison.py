"""Compare the candidate with the registry's champion, which is scored again on the same records."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from steadytrain.components.evaluate.bootstrap import FloatArray, Resampling
from steadytrain.components.evaluate.gate import Gate
from steadytrain.components.evaluate.language_tasks import run_lm_tasks
from steadytrain.components.evaluate.measure import metrics
from steadytrain.components.evaluate.paired import spans
from steadytrain.components.evaluate.pairs import Pair, mean
from steadytrain.components.evaluate.scores import Scores
from steadytrain.components.evaluate.scoring import Report, place, score
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.lm_tasks import LmTasks
from steadytrain.components.shared.records import DataRecord, EvaluationRecord, GateRecord
from steadytrain.components.shared.registry.verdict import decided_about
from steadytrain.components.shared.registry.versions import (
    LABELS,
    RUN,
    SPLIT,
    TASK,
    WEIGHTS,
    Version,
    comparable_tags,
)
from steadytrain.components.tasks.registry import OpenTask

_OTHER_SPLIT: Final = (
    "the model that it started from (model.base) was trained on another split, so that it may have "
    "seen these records; give this run that one's data.split_salt, data.validation_share, "
    "data.test_share and data.columns.group, or start from another model"
)


@dataclass(frozen=True)
class Candidate:
    """An evaluated candidate.

    records: the records it was scored on.
    scores: its scores on these records, in the same order.
    tasks: lm-eval's tasks, if the gate compares models by one of them.
    """

    config: RunConfig
    data: DataRecord
    task: OpenTask
    weights_digest: str
    evaluation: EvaluationRecord
    records: pa.Table
    scores: Scores
    tasks: LmTasks | None = None

    def registered_as(self, version: Version) -> bool:
        """Return whether `version` was registered by this run with these weights."""
        tags = version.tags
        return tags.get(RUN) == self.config.run_id and tags.get(WEIGHTS) == self.weights_digest

    def against(self, champion: Version | None, report: Report) -> GateRecord:
        """Return the gate's decision. A champion that cannot be compared fairly is not replaced.

        Args:
            report: called with the number of records that the champion has been scored on.

        Raises:
            BadInput: the candidate has no finite value in the metric to compare by.
        """
        reached = self.evaluation.tasks
        values = {name: item.value for name, item in self.evaluation.metrics.items()}
        values |= {name: item.value for name, item in reached.items()}
        directions = {name: metric.greater_is_better for name, metric in metrics().items()}
        for name, item in reached.items():
            if item.greater_is_better is not None:
                directions[name] = item.greater_is_better
        subject = decided_about(self.config, self.evaluation.weights_digest)
        metric = self.config.gate.metric or self.scores.metric
        if metric not in values:
            raise BadInput(
                f"gate.metric = {metric!r}: the model's value of it is not finite",
                remedy="choose a metric that applies to this task and its documents",
            )
        gate = Gate(
            subject,
            self.config.gate,
            metric,
            resampling(self.config),
            directions,
            list(self.config.data.parts),
        )
        if set(self.evaluation.splits) - {self.data.split_digest}:
            return gate.refuse(values, _OTHER_SPLIT, champion.number if champion else None)
        if champion is None:
            return gate.decide(values, None)
        refusal = self._unlike(champion)
        if refusal:
            return gate.refuse(values, refusal, champion.number)
        packager, scorer = self.task.packager, self.task.scorer
        try:
            components = place(packager.load_logged(champion.uri), self.config)
            if self.config.gate.task_metric:
                pair = self._task_pair(champion, components, report)
            else:
                given = ("the champion", scorer.score, components, self.records, report)
                theirs = Scores.of(score(*given))
                pair = self._pair(champion, theirs, metric)
        except Exception as error:
            # A foreign model can raise anything, and the candidate is not to blame for it.
            said = redact(str(error).strip().partition("\n")[0]) or type(error).__name__
            return gate.refuse(
                values,
                f"the champion, version {champion.number}, cannot be loaded or scored: {said}",
                champion.number,
            )
        if isinstance(pair, str):
            return gate.refuse(values, pair, champion.number)
        return gate.decide(values, pair)

    def _unlike(self, champion: Version) -> str:
        """Return why the two models must not be compared, or "" if they can be."""
        who = f"the champion, version {champion.number},"
        if champion.tags.get(WEIGHTS) == self.weights_digest:
            return f"{who} is this same model"
        differences = {
            TASK: f"{who} is for another task",
            SPLIT: f"{who} was trained on another split, so that it may have seen these records",
            LABELS: f"{who} has other labels",
        }
        for tag, mine in comparable_tags(self.config, self.data).items():
            if champion.tags.get(tag) is None:
                return f"{who} does not record its {tag.partition('.')[2].replace('_', ' ')}"
            if champion.tags[tag] != mine:
                return differences[tag]
        return ""

    def _task_pair(self, champion: Version, components: Any, report: Report) -> Pair | str:
        """Pair both models on the documents of the task in `gate.metric`, or return why not."""
        assert self.tasks is not None
        metric = self.config.gate.metric
        opened = self.tasks.only(str(metric).rpartition("/")[0])
        theirs = run_lm_tasks(
            components,
            opened,
            batch_size=self.config.evaluation.batch_size,
            how=resampling(self.config),
            progress=lambda _, done, __: report(done),
        ).answers
        mine = pq.read_table(self.evaluation.answers)
        (candidate, weights), (other, their_weights) = (
            _parts(table.filter(pc.field("metric") == metric)) for table in (mine, theirs)
        )
        who = f"the champion, version {champion.number},"
        if not np.array_equal(weights, their_weights):
            return f"{who} was scored on other documents of {metric}"
        if not np.isfinite(other).all():
            return f"{who} gave answers that are not finite"
        return Pair(
            version=champion.number,
            digest=champion.tags.get(WEIGHTS, ""),
            candidate=mean(candidate, weights),
            champion=mean(other, weights),
            units=np.arange(len(weights)),
            slices={},
        )

    def _pair(self, champion: Version, theirs: Scores, name: str) -> Pair | str:
        """Pair both models on the test side by one of its metrics, or return why not."""
        mine, metric = self.scores, metrics()[name]
        who = f"the champion, version {champion.number},"
        if theirs.id != mine.id:
            return f"{who} was scored on other records"
        if not np.array_equal(spans(metric, theirs), spans(metric, mine)):
            return f"{who} was scored on other spans"
        if not np.isfinite(theirs.loss).all():
            return f"{who} has losses that are not finite"
        if metric.value(theirs) is None:
            return f"{who} has no {name}"
        return Pair(
            version=champion.number,
            digest=champion.tags.get(WEIGHTS, ""),
            candidate=partial(metric.resampled, mine),
            champion=partial(metric.resampled, theirs),
            units=mine.units,
            slices=mine.by_slice(),
        )


def _parts(answers: pa.Table) -> tuple[FloatArray, FloatArray]:
    """Return numerators and weights (documents,) of one metric, ordered by document."""
    ordered = answers.sort_by("document")
    return ordered.column("value").to_numpy(), ordered.column("weight").to_numpy()


def resampling(config: RunConfig) -> Resampling:
    """Return the run's bootstrap settings."""
    return Resampling(
        config.evaluation.bootstrap_samples, config.evaluation.confidence, config.training.seed
    )

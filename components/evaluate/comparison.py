"""Compare the candidate with the registry's champion, which is scored again on the same records."""

from __future__ import annotations

import errno
import json
import re
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from steadytrain.components.evaluate.bootstrap import FloatArray, Resampling
from steadytrain.components.evaluate.gate import Gate, TestSide
from steadytrain.components.evaluate.language_tasks import run_lm_tasks
from steadytrain.components.evaluate.metric import Pair, Resampled, Rival, Scores, mean, metrics
from steadytrain.components.evaluate.paired import read_answers, spans
from steadytrain.components.evaluate.scoring import Report, score, test_digest, to_compute_device
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.data_sections import MULTI_TASK, SERIES
from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.errors import BadInput, SteadytrainError, with_causes
from steadytrain.components.shared.foreign import ran_out
from steadytrain.components.shared.lm_tasks import LmTasks
from steadytrain.components.shared.model_source import resolve_model
from steadytrain.components.shared.records import DataRecord, EvaluationRecord, GateRecord
from steadytrain.components.shared.registry import (
    LABELS,
    LEARNED_UNTIL,
    RUN,
    SPLIT,
    TASK,
    WEIGHTS,
    Version,
    comparable_tags,
    decided_about,
)
from steadytrain.components.shared.retry import retry
from steadytrain.components.tasks.base import OpenTask

_Result = TypeVar("_Result")

_CONTENT: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    BadInput,
    EOFError,
    FileNotFoundError,
    IsADirectoryError,
    LookupError,
    NotADirectoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What files that are damaged, incomplete or of another architecture make a loader raise."""
_CONTENT_NAMES: Final = {"SafetensorError", "UnpicklingError", "BadZipFile", "StrictDataclassError"}
_ABSENT: Final = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR}
_SERVICES: Final = re.compile(
    r"(aiohttp|azure|boto3|botocore|google|httpcore|httpx|huggingface_hub|requests|s3transfer"
    r"|sqlalchemy|urllib3)\b"
)
"""Packages whose errors are about a server or the network."""
_DEVICE: Final = re.compile(r"AcceleratorError|CUDA error|HIP error|NCCL error|CUDNN_STATUS")
_NOT_THERE: Final = re.compile(r"\b404\b|NoSuchKey|No such file|does not exist|RESOURCE_DOES_NOT")


class Unfit(SteadytrainError):
    """The champion's own content prevents the comparison."""


class ChampionAway(SteadytrainError):
    """The champion cannot be reached or held in memory now. It says nothing about its content."""

    passing = True


def with_champion(number: str, work: Callable[[], _Result]) -> _Result:
    """Do what loads and scores the champion. Retry while something else than its content fails.

    Args:
        number: the champion's version.

    Raises:
        Unfit: its files are damaged, or do not fit together or with the task.
        ChampionAway: storage, the network, memory or a disk still fails after retries.
    """

    def attempt() -> _Result:
        try:
            return work()
        except Exception as error:
            reason = redact(str(error).strip().partition("\n")[0]) or type(error).__name__
            what = f"the champion, version {number}, cannot be loaded or scored: {reason}"
            if _elsewhere(error):
                raise ChampionAway(
                    what,
                    remedy="this says nothing about the candidate: check the registry's storage, "
                    "the network, memory and disks, then start the evaluate step again",
                ) from error
            if isinstance(error, _CONTENT) or _is_content(error):
                raise Unfit(what) from error
            raise

    return retry(attempt)


def _is_content(error: Exception) -> bool:
    # Transformers raises a plain OSError, without a number, for files that lack something.
    plain = type(error) is OSError and error.errno is None
    return plain or type(error).__name__ in {*_CONTENT_NAMES, "MlflowException"}


def _elsewhere(error: BaseException) -> bool:
    return any(map(_about_the_surroundings, with_causes(error)))


def _about_the_surroundings(error: BaseException) -> bool:
    if isinstance(error, SteadytrainError) and not isinstance(error, BadInput):
        # Storage, tracking, out of memory.
        return True
    if ran_out(error) or isinstance(error, ConnectionError | TimeoutError | sqlite3.Error):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno not in _ABSENT
    kind = type(error)
    if kind.__name__ == "MlflowException":
        # A failed download has no code of its own.
        return not _NOT_THERE.search(f"{getattr(error, 'error_code', '')} {error}")
    if _SERVICES.match(kind.__module__):
        return not _NOT_THERE.search(str(error))
    return isinstance(error, RuntimeError) and bool(_DEVICE.search(f"{kind.__name__}: {error}"))


_OTHER_SPLIT: Final = (
    "the model that it started from (model.base) was trained on another split, so that it may have "
    "seen these records; give this run that one's data.split_salt, data.validation_share, "
    "data.test_share, data.columns.group, data.group_by_prompt and splits of the data, or start "
    "from another model"
)

_UNCHANGED: Final = (
    "training changed nothing: on each test record its loss is that of model.base, to the bit; "
    "raise training.learning_rate or the number of steps"
)


@dataclass(frozen=True)
class Candidate:
    """An evaluated candidate.

    records: the records it was scored on.
    scores: its scores on these records, in the same order.
    baseline: those of the naive baseline, if there is one.
    tasks: lm-eval's tasks, if the gate compares models by one of them.
    """

    config: RunConfig
    data: DataRecord
    task: OpenTask
    weights_digest: str
    evaluation: EvaluationRecord
    records: pa.Table
    scores: Scores
    baseline: Scores | None = None
    tasks: LmTasks | None = None

    def registered_as(self, version: Version) -> bool:
        """Return whether `version` was registered by this run with these weights."""
        tags = version.tags
        return tags.get(RUN) == self.config.run_id and tags.get(WEIGHTS) == self.weights_digest

    @cached_property
    def test_digest(self) -> str:
        """The digest of the ids of the whole test side."""
        return test_digest(self.data)

    def against(self, champion: Version | None, report: Report, *, earlier: int) -> GateRecord:
        """Return the gate's decision. A champion that cannot be compared fairly is not replaced.

        Args:
            report: called with the number of records that the champion has been scored on.
            earlier: number of other models that were judged on the same test side before.

        Raises:
            BadInput: the candidate has no finite value in the metric to compare by.
            ChampionAway: the champion cannot be loaded or scored now, and not because of its
                content.
        """
        values = {name: item.value for name, item in self.evaluation.metrics.items()}
        values |= {name: item.value for name, item in self.evaluation.tasks.items()}
        metric = self.config.gate.metric or self.scores.metric
        if metric not in values:
            raise BadInput(
                f"gate.metric = {metric!r}: the model has no finite value of it",
                remedy="choose a metric that applies to this task and its documents",
            )
        gate = self._gate(metric, earlier)
        version = champion.number if champion else None
        if set(self.evaluation.splits) - {self.data.split_digest}:
            return gate.refuse(values, _OTHER_SPLIT, version)
        naive = self._naive(metric)
        if isinstance(naive, str):
            return gate.refuse(values, naive, version)
        rivals = [] if naive is None else [naive]
        base = self._base(metric, report)
        if isinstance(base, str):
            gate = replace(gate, base_not_compared=base)
        elif base.same:
            return gate.refuse(values, _UNCHANGED, version)
        else:
            rivals.append(base)
        if champion is None:
            return gate.decide(values, None, rivals)
        refusal = self._unlike(champion)
        if refusal:
            return gate.refuse(values, refusal, champion.number)
        try:
            pair = with_champion(
                champion.number, partial(self._against_champion, champion, metric, report)
            )
        except Unfit as error:
            return gate.refuse(values, error.message, champion.number)
        if isinstance(pair, str):
            return gate.refuse(values, pair, champion.number)
        return gate.decide(values, pair, rivals)

    def _gate(self, metric: str, earlier: int) -> Gate:
        directions = {name: item.greater_is_better for name, item in metrics().items()}
        for name, item in self.evaluation.tasks.items():
            if item.greater_is_better is not None:
                directions[name] = item.greater_is_better
        return Gate(
            decided_about(self.config, self.evaluation.weights_digest),
            self.config.gate,
            metric,
            self.config.evaluation.confidence,
            directions,
            self._test_side(earlier),
            list(self.config.data.parts) if self.config.data.task == MULTI_TASK else [],
        )

    def _test_side(self, earlier: int) -> TestSide:
        result = TestSide(self.scores.counted_units, self.test_digest, earlier)
        if self.config.data.task not in SERIES:
            return result
        series, values = self.config.data.series, len(self.scores.id)
        if series.column is None:
            called = f"test values of a single series, for a horizon of {series.horizon},"
            return replace(result, grows_by="a longer data.series.horizon", called=called)
        called = f"series, with {values:,} test values for a horizon of {series.horizon},"
        return replace(result, grows_by="more series", called=called)

    def _against_champion(self, champion: Version, metric: str, report: Report) -> Pair | str:
        components = to_compute_device(self.task.packager.load_logged(champion.uri), self.config)
        if self.config.gate.task_metric:
            return self._task_pair(champion, components, report)
        scorer = self.task.scorer
        given = ("the champion", scorer.score, components, self.records, report)
        return self._pair(champion, Scores.of(score(*given)), metric)

    def _naive(self, metric: str) -> Rival | str | None:
        """Return the naive baseline as a rival, if there is one, or why it cannot be compared.

        If the gate's metric has no value there, the task's default metric takes its place.
        """
        if self.baseline is None or not self.config.gate.beat_baseline:
            return None
        name = metric if metric in self.evaluation.baselines else self.scores.metric
        if name not in self.evaluation.baselines:
            return None
        if why := self._why_unpaired("the naive baseline", self.baseline, name):
            return why
        return Rival("the naive baseline", name, *self._resampled(name, self.baseline))

    def _base(self, metric: str, report: Report) -> Rival | str:
        """Return the model that training started from as a rival, or why it is none.

        Returns:
            "" if training started from scratch.
        """
        base = self.config.model.base
        if not base:
            return ""
        if self.task.is_compared_with_base:
            return "the loss of this task is a comparison with it already"
        # Imports torch, which a finished run that is started again does not need.
        packager = self.task.packager
        if not hasattr(packager, "load_base"):
            return f"data.task {self.config.data.task} does not load it"
        # An address that cannot be read is an error. Below, it is the model that does not fit.
        resolve_model(base, self.config)
        try:
            components = to_compute_device(packager.load_base(), self.config)
        except BadInput as error:
            return error.message
        given = ("model.base", self.task.scorer.score, components, self.records, report)
        theirs = Scores.of(score(*given))
        name = self.scores.metric if "/" in metric else metric
        if why := self._why_unpaired("model.base", theirs, name):
            return why
        same = np.array_equal(self.scores.loss, theirs.loss)
        return Rival("model.base", name, *self._resampled(name, theirs), same)

    def _unlike(self, champion: Version) -> str:
        """Return why the two models must not be compared, or "" if they can be."""
        who = f"the champion, version {champion.number},"
        if champion.tags.get(WEIGHTS) == self.weights_digest:
            return f"{who} is this same model"
        differences = {
            TASK: f"{who} is for another task",
            SPLIT: f"{who} was trained on another split, so that it may have seen these records",
            LABELS: f"{who} has other labels, or has them in another order (see data.labels)",
        }
        for tag, mine in comparable_tags(self.config, self.data).items():
            if champion.tags.get(tag) is None:
                return f"{who} does not record its {tag.partition('.')[2].replace('_', ' ')}"
            if champion.tags[tag] != mine and not (tag == SPLIT and self._is_later(champion)):
                return differences[tag]
        return ""

    def _is_later(self, champion: Version) -> bool:
        """Return whether time divides both models' records, and the test side is later than all
        that the champion learned from.

        Newer records make another split, in which the champion has seen none of the test side.
        """
        known, mine = champion.tags.get(LEARNED_UNTIL), self.data.tested_from
        if known is None or mine is None:
            return False
        try:
            kind, until = json.loads(known)
            return bool(kind == mine[0] and until < mine[1])
        except (ValueError, TypeError):
            # Somebody has changed the tag.
            return False

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
        mine = read_answers(Path(self.evaluation.answers))
        (candidate, weights), (other, their_weights) = (
            _ratio_terms(table.filter(pc.field("metric") == metric)) for table in (mine, theirs)
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
            units=np.where(weights > 0, np.arange(len(weights)), -1),
            slices={},
        )

    def _pair(self, champion: Version, theirs: Scores, name: str) -> Pair | str:
        """Pair both models on the test side by one of its metrics, or return why not."""
        why = self._why_unpaired(f"the champion, version {champion.number},", theirs, name)
        if why:
            return why
        mine, other = self._resampled(name, theirs)
        return Pair(
            version=champion.number,
            digest=champion.tags.get(WEIGHTS, ""),
            candidate=mine,
            champion=other,
            units=self.scores.counted_units,
            slices=self.scores.by_slice(),
        )

    def _resampled(self, name: str, theirs: Scores) -> tuple[Resampled, Resampled]:
        """Return a metric of the candidate and of another model."""
        metric = metrics()[name]
        return partial(metric.resampled, self.scores), partial(metric.resampled, theirs)

    def _why_unpaired(self, who: str, theirs: Scores, name: str) -> str:
        """Return why the scores of another model cannot be paired, or "" if they can."""
        mine, metric = self.scores, metrics()[name]
        if theirs.id != mine.id:
            return f"{who} was scored on other records"
        if not np.array_equal(spans(metric, theirs), spans(metric, mine)):
            return f"{who} was scored on other spans"
        if not np.isfinite(theirs.loss).all():
            return f"{who} has losses that are not finite"
        return "" if metric.value(theirs) is not None else f"{who} has no {name}"


def _ratio_terms(answers: pa.Table) -> tuple[FloatArray, FloatArray]:
    """Return numerators and weights (documents,) of one metric, ordered by document."""
    ordered = answers.sort_by("document")
    return ordered.column("value").to_numpy(), ordered.column("weight").to_numpy()


def resampling(config: RunConfig) -> Resampling:
    """Return the run's bootstrap settings."""
    return Resampling(
        config.evaluation.bootstrap_samples, config.evaluation.confidence, config.training.seed
    )

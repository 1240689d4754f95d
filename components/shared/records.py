"""What each step passes to the next: small typed records, stored as JSON.

They are the content of the pipeline's KFP artifacts. Large things (packed data, checkpoints, the
model) stay in the workspace, and a record says where they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import ClassVar, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator

from steadytrain.components.shared.config.fields import Decision
from steadytrain.components.shared.errors import BadInput, Unreadable
from steadytrain.components.shared.paths import checked
from steadytrain.components.shared.storage import LocalStorage

Side = Literal["train", "validation", "test"]
Places = Mapping[str, tuple[str, int]]


class Record(BaseModel):
    """A step's result."""

    # JSON has no NaN or infinity. Written as null, they would make the record unreadable.
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")

    schema_version: Literal[1] = 1

    _places: ClassVar[Places] = {}
    """Fields with an absolute path in the output folder: the name of its first part below that
    folder, and the number of parts."""

    def in_output(self, output: Path) -> Self:
        """Return the record with paths in an output folder, as far as something is there.

        The output may have been moved or copied since the record was written.
        """
        fields = {}
        for field, (first, count) in self._places.items():
            parts = Path(getattr(self, field)).parts[-count:]
            if parts[:1] == (first,) and (here := output.joinpath(*parts)).exists():
                fields[field] = str(here)
        return self.model_copy(update=fields)

    def save(self, path: Path) -> None:
        """Write the record atomically."""
        LocalStorage(path.parent).write(path.name, self.model_dump_json(indent=2).encode())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a record.

        Raises:
            BadInput: if it is missing or damaged, or has another version.
        """
        try:
            record = cls.model_validate_json(LocalStorage(path.parent).read(path.name))
            match path.absolute().parts:
                case [*output, "runs", _, "records", _]:
                    return record.in_output(Path(*output))
            return record  # a pipeline's artifact
        except FileNotFoundError as error:
            raise BadInput(
                f"{path} is missing: the step before this one has not finished",
                remedy="run the steps in their order, or the whole pipeline",
            ) from error
        except (ValueError, Unreadable) as error:
            raise BadInput(
                f"{path} cannot be read by this version: {error}",
                remedy="run the step that writes it again",
            ) from error


class SourceRecord(Record):
    """One of the data sets of a mixture, on one side. Its rows follow those of the one before."""

    name: str
    rows: int
    documents: int
    tokens: int


class SideRecord(Record):
    """One side of the split.

    shards: Arrow files, relative to the data folder. The training loop counts each row as one
        sequence of the batch.
    rows: sequences (packed) or examples.
    tokens: all tokens on this side.
    target_tokens: the tokens that count in the loss.
    documents: input records on this side.
    index: Arrow file, relative to the data folder, with one row per row of the shards, in order:
        shard, row (in the shard), tokens, targets, documents (content hashes).
    sources: the data sets of a mixture, in the order of their rows; empty for one data set.
    """

    shards: list[str]
    rows: int
    documents: int
    index: str = ""
    tokens: int = 0
    target_tokens: int = 0
    sources: list[SourceRecord] = []


class FoldRecord(Record):
    """A fold of the training side.

    records: Arrow file, relative to the data folder, with its raw records, as
        `DataRecord.test_records`.
    """

    side: SideRecord
    records: str


class DataProfile(Record):
    """Statistics of the input records (see components/preprocess/profile.py).

    Each is [half][bucket], in millionths of the total in both halves. All are 0 if the data have
    nothing of that kind.
    """

    lengths: list[list[int]]
    labels: list[list[int]]
    words: list[list[int]]


TimeKey = tuple[str, float | str]
"""A time that can be compared with others of its kind: the kind, and a number or ISO 8601 text."""


def time_key(kind: str, value: float | datetime) -> TimeKey:
    """Return a time that has been read as one that a record of the data holds."""
    return kind, value.isoformat() if isinstance(value, datetime) else float(value)


class DataRecord(Record):
    """Prepared data.

    folder: absolute path of the data folder.
    fingerprint: digest over content, tokenizer, split and code.
    sides: train, validation and test, as the training loop reads them.
    test_records: Arrow file, relative to `folder`, with the raw records of the test side: `id`
        (content hash), the task's text columns, `label`, `group`, `slice`. Candidate and champion
        are evaluated on these records.
    split_digest: digest of salt, shares, group column, and the records of held-out splits that the
        data give. If two digests are equal, equal records are on the same side, except for a few
        of small classes.
    tokenizer: folder, relative to `folder`; "" if the task has none.
    labels: classes in the order of their indices; empty for language models.
    turn_ends: tokens that end the assistant's turns on the training side.
    inputs_digest: digest over the input as it was stored; "" if unknown.
    profile: statistics of all good records, before duplicates are removed; None if unknown.
    folds: the training side in parts, if it was prepared for cross-validation; of time series, two
        more than folds (`Encoder.parts_in_time`).
    learned_until, tested_from: the latest time of the training and validation sides, and the
        earliest of the test side; None unless time divides the records.
    """

    _places: ClassVar[Places] = {"folder": ("data", 2)}

    folder: str
    fingerprint: str
    task: str
    sides: dict[Side, SideRecord]
    test_records: str
    split_digest: str
    sequence_length: int = 0
    tokenizer: str = ""
    labels: list[str] = []
    turn_ends: list[int] = []
    inputs_digest: str = ""
    profile: DataProfile | None = None
    folds: list[FoldRecord] = []
    learned_until: TimeKey | None = None
    tested_from: TimeKey | None = None

    def path(self, name: str) -> Path:
        """Return the absolute path of something in the data folder.

        Raises:
            UnsafeName: if the name leads out of the folder.
        """
        return Path(self.folder) / checked(name, origin=f"prepared data {self.folder}")


TRAINING_LOSS: Final = "training_loss"
"""The metric of a model that was never validated."""


class TrainRecord(Record):
    """A trained model.

    model: absolute path of the exported model's folder.
    weights_digest: digest over the exported weight files.
    files: the digest of each of the model's other files, such as its tokenizer, by relative path.
    best_score: score of the exported model in `metric`.
    decisions: choices that were open or could have been different, each with its reason.
    """

    _places: ClassVar[Places] = {"model": ("runs", 3)}

    outcome: str
    model: str
    weights_digest: str
    metric: str
    best_score: float
    best_step: int
    steps: int
    attempts: int
    parameters: int
    seconds: float
    decisions: list[Decision] = []
    files: dict[str, str] = {}

    @property
    def validated(self) -> bool:
        """Whether the score is of a validation. It is that of the last steps if there was none."""
        return self.metric != TRAINING_LOSS


class Interval(Record):
    """A metric with its bootstrap confidence interval."""

    value: float
    low: float
    high: float


class CalibrationBin(Record):
    """Predictions that a classifier makes with about the same confidence.

    confidence, accuracy: means over the examples of the bin.
    """

    examples: int
    confidence: float
    accuracy: float


class TaskScore(Record):
    """A model's score in one metric of one lm-eval task.

    stderr: standard error; None if neither lm-eval nor steadytrain knows one.
    greater_is_better: None if the task does not say.
    """

    value: float
    stderr: float | None = None
    greater_is_better: bool | None = None
    examples: int


class LandscapeRing(Record):
    """The loss at the points of a grid that are about equally far from its middle.

    distance: the larger of the two steps' sizes.
    lowest, mean, highest: of the finite losses; None if there is none.
    """

    distance: float
    lowest: float | None
    mean: float | None
    highest: float | None
    not_finite: int


class LandscapeRecord(Record):
    """The loss of a model on a square grid around its trained weights.

    records: number of test records that the loss is taken on.
    seed: of the two random directions.
    steps: along each direction; 0 is in the middle.
    losses: one row per step along the second direction, with one value per step along the first, in
        nats per target; None if not finite.
    profile: the same by distance, from the middle outwards.
    """

    records: int
    radius: float
    seed: int
    steps: list[float]
    losses: list[list[float | None]]
    profile: list[LandscapeRing]


class EvaluationRecord(Record):
    """The candidate's results on the test side.

    weights_digest: identifies the evaluated model, as in its TrainRecord.
    metrics: by name, such as loss, perplexity, bits_per_byte, accuracy, macro_f1.
    slices: by slice value, then by metric.
    scores: absolute path of the per-example scores (Parquet).
    confusion: rows are true labels, columns are predictions; empty for language models.
    splits: digests of the splits that the model, or a model it started from, was trained with, as
        far as the model records them.
    calibration, curves: for classifiers. curves are (recall, precision) by label, for the classes
        with the worst results.
    tasks: results of lm-eval tasks, by TASK/METRIC.
    robustness: metrics under an attack on the embeddings ("attack") and with typing errors
        ("character_noise"), as far as they are configured. With several data sets, also those of
        each, as PART/metric.
    landscape: the loss around the trained weights, if it is configured.
    landscape_missing: why it is configured and still not there, and the fix; "" otherwise.
    answers: absolute path of the result for each document of those tasks (Parquet); "" without
        tasks.
    baselines, baseline_scores: the metrics of the naive baseline, and the absolute path of its
        scores, as `scores`; "" if there is none.
    """

    _places: ClassVar[Places] = dict.fromkeys(("scores", "answers", "baseline_scores"), ("runs", 4))

    task: str
    weights_digest: str
    examples: int
    metrics: dict[str, Interval]
    baselines: dict[str, float] = {}
    slices: dict[str, dict[str, float]] = {}
    labels: list[str] = []
    confusion: list[list[int]] = []
    per_class: dict[str, dict[str, float]] = {}
    calibration: list[CalibrationBin] = []
    curves: dict[str, list[tuple[float, float]]] = {}
    scores: str
    splits: list[str] = []
    tasks: dict[str, TaskScore] = {}
    answers: str = ""
    baseline_scores: str = ""
    robustness: dict[str, dict[str, Interval]] = {}
    landscape: LandscapeRecord | None = None
    landscape_missing: str = ""

    def unperturbed(self, name: str) -> float | None:
        """Return the value that one of `robustness` compares with; None if there is none."""
        part, _, metric = name.rpartition("/")
        if part:
            return self.slices.get(part, {}).get(metric)
        return self.metrics[name].value if name in self.metrics else None


class Subject(Record):
    """What a gate decision is about. The decision is valid for nothing else.

    weights_digest: identifies the candidate, as in its TrainRecord.
    rules: digest of the configuration fields that the decision depends on.
    """

    run_id: str
    model_name: str
    champion_alias: str
    weights_digest: str
    rules: str


class Comparison(Record):
    """The candidate against a model that it must beat even without a champion.

    what: names that model.
    candidate, other: both values of `metric`.
    improvement: relative to the other model.
    """

    what: str
    metric: str
    candidate: float
    other: float
    improvement: Interval


class GateRecord(Record):
    """The gate's decision: promoted or not, every number, and the reason in one sentence.

    undecided: whether there are too few test records to decide. Such a model is not promoted.
    champion_weights: digest of the champion's weights, as its version records it; "" if it does
        not.
    compared: number of configurations that a search compared to choose the candidate's.
    earlier: number of other models of the registered model that were judged on the same test
        records before.
    confidence: level of the intervals, after the correction for `compared` and `earlier`; 0 if
        unknown.
    units: number of independent test examples; 0 if unknown.
    test_digest: digest of the ids of the test side; "" if unknown.
    comparisons: with the naive baseline and with model.base, as far as the task can score them.
    base_not_compared: why the candidate is not compared with model.base; "" if it is, or if
        training started from scratch.

    Raises:
        ValueError: if it says "promoted" but its own numbers do not support that.
    """

    subject: Subject
    promoted: bool
    reason: str
    metric: str
    greater_is_better: bool
    candidate: float
    champion: float | None = None
    champion_version: str | None = None
    champion_weights: str = ""
    improvement: Interval | None = None
    margin: float
    floors: dict[str, float] = {}
    slices: dict[str, float] = {}
    compared: int = 1
    undecided: bool = False
    earlier: int = 0
    confidence: float = 0.0
    units: int = 0
    test_digest: str = ""
    comparisons: list[Comparison] = []
    base_not_compared: str = ""

    @model_validator(mode="after")
    def _a_promotion_is_justified(self) -> Self:
        # A bug in the gate or a damaged file must not promote a model.
        if not self.promoted:
            return self
        if self.undecided:
            raise ValueError("promoted and undecided")
        for item in self.comparisons:
            if not min(item.improvement.value, item.improvement.low) > self.margin:
                raise ValueError(f"promoted without an improvement over {item.what}")
        numbers = [self.candidate, self.margin, *self.floors.values(), *self.slices.values()]
        if self.champion_version is not None:
            if self.champion is None or self.improvement is None:
                raise ValueError("promoted over a champion without a comparison")
            improvement = self.improvement
            numbers += [self.champion, improvement.value, improvement.low, improvement.high]
            if not min(improvement.value, improvement.low) > self.margin:
                raise ValueError("promoted without an improvement beyond the margin")
        if not all(map(math.isfinite, numbers)):
            raise ValueError("promoted on numbers that are not finite")
        sign = 1 if self.greater_is_better else -1
        if sign * self.candidate < sign * self.floors.get(self.metric, self.candidate):
            raise ValueError("promoted beyond its floor")
        return self


class RegistrationRecord(Record):
    """The registered version."""

    model_name: str
    version: str
    model_uri: str
    champion: bool
    reason: str

    def same_version(self, other: RegistrationRecord) -> bool:
        """Whether both are about one version of one model."""
        return (self.model_name, self.version) == (other.model_name, other.version)

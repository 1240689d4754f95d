"""What each step gives to the next: small typed records, stored as JSON.

They are the content of the pipeline's KFP artifacts; what is large (packed
data, checkpoints, the model) stays in the workspace, and a record tells where.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator

from steadytrain.components.shared.decision import Decision
from steadytrain.components.shared.errors import BadInput, Unreadable
from steadytrain.components.shared.paths import checked
from steadytrain.components.shared.storage import LocalStorage

Side = Literal["train", "validation", "test"]


class Record(BaseModel):
    """A step's result."""

    # JSON has no NaN and no infinity; as null, a record that holds one could not be read again.
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")

    schema_version: Literal[1] = 1

    def save(self, path: Path) -> None:
        """Writes the record, whole or not at all."""
        LocalStorage(path.parent).write(path.name, self.model_dump_json(indent=2).encode())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads a record.

        Raises:
            BadInput: there is none, it is damaged, or it is of another version.
        """
        try:
            return cls.model_validate_json(LocalStorage(path.parent).read(path.name))
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


class SideRecord(Record):
    """One side of the split.

    shards: Arrow files, relative to the data folder; each row is what the loop
        counts as one sequence of the batch.
    rows: sequences (packed) or examples.
    tokens: all tokens in them; target_tokens: those that count in the loss.
    documents: input records on this side.
    index: Arrow file, relative to the data folder, with a row for each row of the
        shards, in order: shard, row (in the shard), tokens, targets, documents
        (content hashes).
    """

    shards: list[str]
    rows: int
    documents: int
    index: str = ""
    tokens: int = 0
    target_tokens: int = 0


class DataProfile(Record):
    """What records are like (see components/preprocess/profile.py).

    Each is [half][bucket], in parts of a million of what both halves hold; all are 0 where the
    data have nothing of the kind.
    """

    lengths: list[list[int]]
    labels: list[list[int]]
    words: list[list[int]]


class DataRecord(Record):
    """Prepared data.

    folder: absolute path of the data folder.
    fingerprint: digest over content, tokenizer, split and code.
    sides: train, validation, test as the loop reads them.
    test_records: Arrow file, relative to `folder`, of the raw records of the
        test side: `id` (content hash), the task's text columns, `label`,
        `group`, `slice`; this is what candidate and champion are judged on.
    split_digest: digest of salt, shares and group column: equal digests mean
        that equal records are on equal sides.
    tokenizer: folder, relative to `folder`; "" where the task has none.
    labels: classes in the order of their indices; empty for language models.
    inputs_digest: digest over what was read, as it was stored; "" where it is not known.
    profile: of all good records, before duplicates are set aside; none where it is not known.
    """

    folder: str
    fingerprint: str
    task: str
    sides: dict[Side, SideRecord]
    test_records: str
    split_digest: str
    sequence_length: int = 0
    tokenizer: str = ""
    labels: list[str] = []
    inputs_digest: str = ""
    profile: DataProfile | None = None

    def path(self, name: str) -> Path:
        """Absolute path of something in the data folder.

        Raises:
            UnsafeName: the name leads out of the folder.
        """
        return Path(self.folder) / checked(name, origin=f"prepared data {self.folder}")


class TrainRecord(Record):
    """A trained model.

    model: absolute path of the exported model's folder.
    weights_digest: digest over the exported weight files.
    best_score: of the model that was exported; `metric` names it.
    decisions: what was open or might have been, each with its reason.
    """

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


class Interval(Record):
    """A metric with its bootstrap confidence interval."""

    value: float
    low: float
    high: float


class EvaluationRecord(Record):
    """The candidate on the test side.

    weights_digest: the model that was scored, as in its TrainRecord.
    metrics: by name, such as loss, perplexity, bits_per_byte, accuracy, macro_f1.
    slices: by slice value, then by metric.
    scores: absolute path of the per-example scores (Parquet).
    confusion: rows are true labels, columns predictions; empty for language models.
    splits: digests of the splits that the model, or one that it started from, was trained with, as
        far as it tells.
    """

    task: str
    weights_digest: str
    examples: int
    metrics: dict[str, Interval]
    baselines: dict[str, float] = {}
    slices: dict[str, dict[str, float]] = {}
    labels: list[str] = []
    confusion: list[list[int]] = []
    per_class: dict[str, dict[str, float]] = {}
    scores: str
    splits: list[str] = []


class Subject(Record):
    """What a decision of the gate is about. It holds for nothing else.

    weights_digest: the candidate, as in its TrainRecord.
    rules: digest of what decides in the configuration.
    """

    run_id: str
    model_name: str
    champion_alias: str
    weights_digest: str
    rules: str


class GateRecord(Record):
    """The decision: promoted or not, every number, and one sentence why.

    champion_weights: digest of the champion's weights, as its version says; "" where it does not.

    Raises:
        ValueError: it says "promoted", and its own numbers do not.
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

    @model_validator(mode="after")
    def _a_promotion_is_justified(self) -> Self:
        # The gate has no such bug and its file no such damage, or nothing is promoted.
        if not self.promoted:
            return self
        numbers = [self.candidate, self.margin, *self.floors.values(), *self.slices.values()]
        if self.champion_version is not None:
            if self.champion is None or self.improvement is None:
                raise ValueError("promoted over a champion without a comparison")
            improvement = self.improvement
            numbers += [self.champion, improvement.value, improvement.low, improvement.high]
            if not min(improvement.value, improvement.low) > self.margin:
                raise ValueError("promoted without an improvement beyond the margin")
        if not all(map(math.isfinite, numbers)):
            raise ValueError("promoted by numbers that are not finite")
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

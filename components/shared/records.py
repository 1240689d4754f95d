"""What each step gives to the next: small typed records, stored as JSON.

They are the content of the pipeline's KFP artifacts; what is large (packed
data, checkpoints, the model) stays in the workspace, and a record tells where.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict

from steadytrain.components.shared.decision import Decision
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.storage import LocalStorage

Side = Literal["train", "validation", "test"]


class Record(BaseModel):
    """A step's result."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1

    def save(self, path: Path) -> None:
        """Writes the record, whole or not at all."""
        LocalStorage(path.parent).write(path.name, self.model_dump_json(indent=2).encode())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads a record.

        Raises:
            BadInput: there is none, or it is of another version.
        """
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError as error:
            raise BadInput(
                f"{path} is missing: the step before this one has not finished",
                remedy="run the steps in their order, or the whole pipeline",
            ) from error
        except ValueError as error:
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
        """Absolute path of something in the data folder."""
        return Path(self.folder) / name


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

    metrics: by name, such as loss, perplexity, bits_per_byte, accuracy, macro_f1.
    slices: by slice value, then by metric.
    scores: absolute path of the per-example scores (Parquet).
    confusion: rows are true labels, columns predictions; empty for language models.
    """

    task: str
    examples: int
    metrics: dict[str, Interval]
    baselines: dict[str, float] = {}
    slices: dict[str, dict[str, float]] = {}
    labels: list[str] = []
    confusion: list[list[int]] = []
    per_class: dict[str, dict[str, float]] = {}
    scores: str


class GateRecord(Record):
    """The decision: promoted or not, every number, and one sentence why."""

    promoted: bool
    reason: str
    metric: str
    greater_is_better: bool
    candidate: float
    champion: float | None = None
    champion_version: str | None = None
    improvement: Interval | None = None
    margin: float
    floors: dict[str, float] = {}
    slices: dict[str, float] = {}


class RegistrationRecord(Record):
    """The registered version."""

    model_name: str
    version: str
    model_uri: str
    champion: bool
    reason: str

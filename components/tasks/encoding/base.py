"""The interface of an encoder: how a task's records are read, checked, and turned into rows.

Preprocessing knows nothing else about a task. It runs in an image without torch, so neither an
encoder nor the module that it comes from may import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from steadytrain.components.tasks.encoding.fields import Defect

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS: Final = "columns.json"
"""File of the prepared data with what `Encoder.describe` returned."""


@dataclass(frozen=True, slots=True)
class Content:
    """What a task uses of a record.

    text: everything that the model learns from, as text, such as JSON.
    label: the class, or several as `Encoder.classes_in` reads them, or the number to predict; None
        if the task has none of these.
    prompt: what answers to one prompt share. They go to one side of the split. None if the record
        is no answer to anything.
    identity: records with the same one are duplicates, and it decides the side of the split. It is
        the text if that does not depend on settings; None stands for that.
    unread: number of its messages with each key that nothing reads.
    layout: the layout that was detected; "" if the columns are those of the configuration.
    noticed: what is odd about the record, as the end of a sentence that begins with the number of
        such records; "" if nothing is.
    attachment: what it learns from besides the text, such as pixels; b"" if there is nothing.
    """

    text: str
    label: str | None = None
    prompt: str | None = None
    identity: str | None = None
    unread: Mapping[str, int] = field(default_factory=dict, compare=False)
    layout: str = ""
    noticed: str = field(default="", compare=False)
    attachment: bytes = b""


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """A row to train on.

    values: by column of `Encoder.schema`, and of those in `added_columns` that the task supports.
    tokens: tokens in it, or other units of work.
    targets: number of its targets: what the loss is divided by.
    """

    values: Mapping[str, Any]
    tokens: int
    targets: int


@dataclass(frozen=True, slots=True)
class EncodedRecord:
    """The rows of a record.

    tokens: in the whole record, at least 1.
    skipped: windows of it with nothing to predict.
    truncated: whether its end is left out.
    windowed: whether `data.long_records` put it into windows.
    ends: tokens that end the assistant's turns.
    unprinted: number of its messages with each key that the chat template does not print.
    """

    tokens: int
    rows: list[EncodedRow]
    skipped: int = 0
    truncated: bool = False
    windowed: bool = False
    ends: frozenset[int] = frozenset()
    unprinted: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenizerSettings:
    """How records that are text are tokenized and compared.

    texts: returns the texts in `Content.text`, to train a tokenizer on.
    special: special tokens of a trained tokenizer, next to those for the end and for padding.
    adds_ends: whether a trained tokenizer adds the end token before and after each text.
    mask: mask token of a trained tokenizer; "" for none.
    chat_template: for tokenizers without one; "" for none.
    compared: returns the texts in `Content.text` that must all be similar in near duplicates, such
        as prompt and answer; as many for each record, "" for one that is absent. None compares
        `Content.text` as a whole.
    documents: names of the documents in a row, such as chosen and rejected, if it has several.
    pairs: whether a trained tokenizer also adds the end token between and after two texts.
    """

    texts: Callable[[str], Iterable[str]]
    special: tuple[str, ...] = ()
    adds_ends: bool = False
    mask: str = ""
    chat_template: str = ""
    compared: Callable[[str], Sequence[str]] | None = None
    documents: tuple[str, ...] = ()
    pairs: bool = False


@dataclass(frozen=True)
class Fitted:
    """What preprocessing knows about the data as a whole before it encodes the first record.

    tokenizer: folder of the tokenizer; None if the task has none.
    labels: classes, in the order of their indices; empty if the task has none.
    trained: the labels that occur on the training side.
    scratch: folder for files that the row encoder needs.
    """

    tokenizer: Path | None
    labels: tuple[str, ...]
    trained: frozenset[str]
    scratch: Path


class RowEncoder(Protocol):
    """Encodes records. It is sent to worker processes, so it can be pickled."""

    def encode(self, records: Sequence[Content]) -> list[EncodedRecord | Defect]:
        """Return the rows of each record, or why it cannot be used, in order."""


class Encoder(Protocol):
    """How the records of a task become rows. It is sent to worker processes, so it can be pickled.

    schema: columns of the rows.
    packed: whether several rows are packed into a sequence of `data.sequence_length` tokens. The
        columns are then `input_ids` and `targets`, and a sequence also has `lengths`.
    labeled: whether each record has a class. The labels are then counted, and duplicates with
        different labels are set aside. If a record has any number of classes instead, a method
        `classes_in(label)` returns those in `Content.label`.
    keeps_copies: whether equal records are all kept, as in a table with few columns. They are on
        one side of the split. Optional; without it, one of them is kept.
    describe: takes the rows of each side, in tables, and returns a `BaseModel` of what those of the
        training side have in common, with a method `remarks` for what users should know, and a
        method `card` for the fields of the data card. It is stored as `COLUMNS`. Optional.
    whole_files: suffixes of files that are one record each, with the content of the file as
        `image`, its folder as `label`, and its `path`. If a folder has such files, others are not
        read. Optional.
    attached: the columns of a table with the names of files, relative to its folder, and their
        suffixes. The content of a file replaces its name. No column stands for every column whose
        value ends with one of the suffixes. None if there is no such column. Optional.
    divide: takes `Content.text` and `Content.label` of all records, and returns the side of each
        record. Optional; without it, a hash of the record or its group decides.
    time_key: takes `Content.text`, and returns the record's time. Goes with `divide`.
    parts_in_time: takes the test columns of all records of the training side and the number of
        folds, and returns the part in time of each record, from 0 to that number plus 1, and how
        many times the shortest series has in part 0; None if there are no series. A fold is tested
        on its number plus 2, validated on the part before, and trained on those before that.
        Optional; without it, folds are random.
    reads_numbers: whether columns of numbers may be learned from, so that those that nothing reads
        are counted, as columns with text are. Optional.
    brief: takes `Content.text`, and returns what people see of it. Optional.
    picture: takes the values of a row, and returns the address of a picture of it. Optional.
    tokenizer: how to make the tokenizer. None means that records are not text: there is no
        tokenizer, and neither near duplicates nor words are looked at.
    """

    @property
    def schema(self) -> pa.Schema: ...

    @property
    def packed(self) -> bool: ...

    @property
    def labeled(self) -> bool: ...

    @property
    def tokenizer(self) -> TokenizerSettings | None: ...

    def columns(self) -> Sequence[Sequence[str]]:
        """Return alternative lists of columns. The data must have all columns of one of them."""

    def read(self, row: Mapping[str, Any]) -> Content:
        """Return what the task uses of a row.

        Raises:
            Defect: the first problem with the row.
        """

    def test_columns(self, records: pa.Table) -> Mapping[str, Any]:
        """Return the columns of test records that `Scorer.score` reads, as typed Arrow arrays.

        Args:
            records: `content` (`Content.text`), `label` and `attachment`; may be empty.
        """

    def row_encoder(self, fitted: Fitted) -> RowEncoder:
        """Return what encodes the records of this data.

        Raises:
            BadInput: the tokenizer cannot be used.
        """


def class_reader(encoder: Encoder) -> Callable[[str], Sequence[str]]:
    """Return the function that returns the classes in `Content.label`."""
    result: Callable[[str], Sequence[str]] = getattr(encoder, "classes_in", _one_class)
    return result


def has_label_sets(encoder: Encoder) -> bool:
    """Return whether each record has several classes, or none."""
    return hasattr(encoder, "classes_in")


def _one_class(label: str) -> Sequence[str]:
    return (label,)

"""The data that the run learns from, and the part held back for evaluation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, ConfigDict, Field, field_validator, model_validator

from steadytrain.components.shared import plugins
from steadytrain.components.shared.config.fusion import MULTIMODAL
from steadytrain.components.shared.config.images import IMAGES, ImagesConfig
from steadytrain.components.shared.config.series import SERIES, SeriesConfig
from steadytrain.components.shared.effects import Effect, IfSet, Use
from steadytrain.components.shared.section import (
    Address,
    PlainJson,
    Section,
    at_odds,
    check_plugins,
    is_local,
)

DataFormat = Literal["auto", "jsonl", "json", "csv", "parquet", "text", "source", "arrow"]

SUFFIXES: Final[Mapping[str, DataFormat]] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".txt": "text",
    ".arrow": "arrow",
}
"""The format of a file by its suffix."""

MULTI_LABEL: Final = "multi_label_classification"
"""The task whose records have any number of labels."""

TABLES: Final = ("tabular_classification", "tabular_regression")
"""The tasks that learn from the columns of a table."""

MULTI_TASK: Final = "multi_task"
"""The task that learns several data sets, each with its own head."""

MIXED: Final = ("causal_lm", "supervised_finetuning")
"""The tasks that learn a mixture of several data sets (`training.mixture`)."""

ANSWERING: Final = (
    "supervised_finetuning",
    "preference",
    "unpaired_preference",
    "text_embedding",
)
"""The tasks whose records are a prompt and what answers it."""

_WITH_PAIRS: Final = ("sequence_classification", "sequence_regression", MULTI_LABEL)
"""The tasks that read two texts together."""

LongRecords = Literal["cut", "drop", "window"]
_LONG: Final[Mapping[str, tuple[LongRecords, ...]]] = {
    "supervised_finetuning": ("cut", "drop", "window"),
    "preference": ("cut", "drop"),
    "unpaired_preference": ("cut", "drop"),
}
"""By task: what it can do with a record that is longer than a row."""

TrainOn = Literal["assistant", "last_turn", "all"]

IN_RULES: Final = IfSet(but=Use.GATE)
"""Marks the fields that decisions of the gate counted before runs did."""

PartName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
Source = Annotated[list[Address], Field(min_length=1)]


def _distinct(labels: list[str]) -> list[str]:
    if len(labels) < 2:
        raise ValueError(f"{labels} gives no choice: name at least two labels")
    for label, count in Counter(labels).items():
        if not label.strip():
            raise ValueError("a label is empty: leave it out")
        if count > 1:
            raise ValueError(f"the label {label!r} is listed {count} times: list it once")
    return labels


Labels = Annotated[list[str], AfterValidator(_distinct)]


class Columns(Section):
    """Which input column holds what. Only the columns that the task needs are read."""

    text: str = Field("text", description="Column with the text to learn from or to classify.")
    text_pair: Annotated[str | None, IN_RULES] = Field(
        None,
        description="For sequence_classification, sequence_regression and "
        "multi_label_classification: column with a second text, such as the hypothesis for a "
        "premise. The tokenizer encodes both as a pair. None means that there is one text.",
    )
    image: Annotated[str | None, IfSet()] = Field(
        None,
        description="For image_classification: column of a table with the name of an image's file, "
        "relative to the folder of the table, or with the content of the file. None means that the "
        "files of data.source are the images, and that their folders are the classes. For "
        "multimodal_classification, None means the column that has images.",
    )
    messages: str = Field(
        "messages", description="Column with a conversation: a list of {role, content}."
    )
    tools: str = Field(
        "tools",
        description="Column with the tools that a conversation may call: a list of JSON schemas. "
        "It may be absent.",
    )
    prompt: str = Field(
        "prompt",
        description="Column with the text before the completion, which does not count in the loss. "
        "For text_embedding: the first text of a pair, such as a question.",
    )
    completion: str = Field(
        "completion",
        description="Column with the answer that the model learns. For text_embedding: the text "
        "that belongs to the prompt.",
    )
    input: Annotated[str | None, IN_RULES] = Field(
        None,
        description="For supervised_finetuning: column with text that follows the prompt on a new "
        "line, such as the context of a question. None means that there is none, or `input` if "
        "the prompt is `instruction`, as in Alpaca.",
    )
    chosen: str = Field(
        "chosen", description="Column with the preferred answer, as text or as messages."
    )
    rejected: str = Field("rejected", description="Column with the other answer.")
    label: str = Field(
        "label",
        description="Column with the class of the text. For multi_label_classification: a list of "
        "its labels, which may be empty. For sequence_regression: the number to predict. For "
        "unpaired_preference: whether the completion is good, true or false.",
    )
    group: str | None = Field(
        None,
        description="Column with a group name of any length. Records of the same group go to the "
        "same side of the split. None means no groups, or one for each prompt "
        "(data.group_by_prompt).",
    )
    slice: str | None = Field(
        None,
        description="Column whose values define slices. Metrics are also reported for each slice. "
        "None means no slices.",
    )
    weight: Annotated[str | None, IfSet()] = Field(
        None,
        description="For tables: column with what each record of the training side counts in the "
        "loss, a number above 0. None means that all count the same.",
    )


class CsvConfig(Section):
    """How files with the format csv are written."""

    delimiter: str | None = Field(
        None,
        min_length=1,
        max_length=1,
        description="Character between two fields. None means the one of comma, tab, semicolon and "
        "vertical bar that gives the header the most fields.",
    )
    quotechar: str = Field(
        '"',
        max_length=1,
        description="Character around a field that contains delimiters or line ends. Empty means "
        "that no field is quoted.",
    )
    escapechar: str | None = Field(
        None,
        min_length=1,
        max_length=1,
        description="Character that takes the meaning from the next one. None means that a quote "
        "in a quoted field is doubled.",
    )
    encoding: str | None = Field(
        None,
        description="Encoding of the text, such as latin-1. None means UTF-8, or UTF-16 if the "
        "file begins with its mark.",
    )

    @field_validator("delimiter", "quotechar", "escapechar")
    @classmethod
    def _no_line_end(cls, mark: str | None) -> str | None:
        if mark in ("\n", "\r", "\0"):
            raise ValueError("a line end cannot have another meaning: give another character")
        return mark

    @field_validator("encoding")
    @classmethod
    def _known(cls, name: str | None) -> str | None:
        try:
            if name is not None:
                "".encode(name)
        except (LookupError, ValueError) as error:
            raise ValueError(
                f"{name!r} is not the name of a text encoding: utf-8, latin-1 and cp1252 are some"
            ) from error
        return name

    @model_validator(mode="after")
    def _distinct_marks(self) -> CsvConfig:
        given = [mark for mark in (self.delimiter, self.quotechar, self.escapechar) if mark]
        if len(set(given)) < len(given):
            raise at_odds(
                "data.csv.delimiter",
                repr(self.delimiter),
                f"delimiter, quotechar and escapechar are {', '.join(map(repr, given))}",
                "give each its own character",
            )
        return self


class PartConfig(Section):
    """One of several data sets that a model learns together."""

    source: Annotated[Source, Effect.SOURCE] = Field(
        ..., description="Where the part's data are, as for data.source."
    )
    format: DataFormat = Field("auto", description="Format of the files, as for data.format.")
    csv: CsvConfig = CsvConfig()
    columns: Columns = Columns()
    labels: Labels | None = Field(
        None, description="Labels that may occur. None means the labels in the training data."
    )


def _source_or_parts(schema: dict[str, Any]) -> None:
    """Require one of the two. Python needs no default: parts become the source."""
    schema["anyOf"] = [{"required": [name]} for name in ("source", "parts")]
    schema["required"] = [name for name in schema["required"] if name != "source"]
    if not schema["required"]:
        del schema["required"]


class DataConfig(Section):
    """The data set: where it is, and how it is read, checked, split and packed."""

    model_config = ConfigDict(json_schema_extra=_source_or_parts)

    task: str = Field(
        "causal_lm",
        description="What to train for: causal_lm, supervised_finetuning, preference, masked_lm, "
        "denoising, text_embedding, sequence_classification, multi_label_classification, "
        "sequence_regression, multi_task, tabular_classification, tabular_regression, "
        "image_classification, multimodal_classification, forecasting, the name of an installed "
        "package's task, or module:NAME for your own task.",
    )
    task_options: Annotated[PlainJson, Effect.ROWS] = Field(
        {},
        description="Settings of the task itself, such as the columns that a package's task "
        "reads. The built-in tasks have none.",
    )
    source: Annotated[Source, Effect.SOURCE] = Field(
        ...,
        description="Where the data are: files, folders, globs, s3:// addresses, hub:NAME for a "
        "data set on a hub, or package:NAME for the files of an installed Python package "
        "(package:stdlib is the standard library).",
    )
    validation_source: Annotated[list[Address], Effect.SOURCE, IN_RULES] = Field(
        [],
        description="Where the validation side is, as for data.source. Empty: the data's own split "
        "(data.splits), or data.validation_share of the training records.",
    )
    test_source: Annotated[list[Address], Effect.SOURCE, IN_RULES] = Field(
        [],
        description="Where the test side is, as for data.source. Empty: the data's own split "
        "(data.splits), or data.test_share of the training records.",
    )
    splits: Annotated[Literal["honor", "pool"], IN_RULES] = Field(
        "honor",
        description="What to do with the splits that data.source names itself, by the names of "
        "its files, folders or splits, such as train, validation and test. honor: validation and "
        "test are these sides of the split, if each of data.parts has them. pool: a new split is "
        "drawn from all records.",
    )
    format: DataFormat = Field(
        "auto", description="Format of the files. auto: chosen by each file's suffix."
    )
    csv: CsvConfig = CsvConfig()
    suffixes: list[str] = Field(
        default=[".py"], description="Suffixes of the files to read from a source tree."
    )
    exclude: list[str] = Field(
        default=[], description="Globs of files to leave out, relative to the source."
    )
    columns: Columns = Columns()
    target: Annotated[str | None, IfSet()] = Field(
        None,
        min_length=1,
        description="For tabular_classification, tabular_regression, multimodal_classification "
        "and forecasting: the column to predict.",
    )
    features: Annotated[list[str], IfSet()] = Field(
        [],
        description="Only for tables: the columns to learn from. Empty: all columns but the "
        "target, data.columns.group and data.columns.slice. Columns that identify a record or "
        "that have one value are left out and reported.",
    )
    images: ImagesConfig = ImagesConfig()
    series: SeriesConfig = SeriesConfig()
    allow_leaks: Annotated[list[str], IfSet()] = Field(
        [],
        description="Only for tables: columns to learn from although they identify a record, or "
        "give the target of every record away.",
    )
    labels: Labels | None = Field(
        None, description="Labels that may occur. None means the labels in the training data."
    )
    label_separator: Annotated[str | None, IN_RULES] = Field(
        None,
        min_length=1,
        description="Only for multi_label_classification: what is between two labels in a column "
        "of text, as in CSV files; spaces around a label do not count, and an empty text has no "
        "label. None means that the column has lists, and that a text is one label.",
    )
    parts: Annotated[dict[PartName, PartConfig], IN_RULES] = Field(
        {},
        description="At least two data sets, by name. data.source may then be left out; it is the "
        "sources of all parts. For multi_task: labeled texts, each set with a head of its own. For "
        "causal_lm and supervised_finetuning: a mixture, whose shares are in training.mixture; a "
        "text that several parts have is learned from one of them.",
    )
    sequence_length: Annotated[int, Effect.ROWS] = Field(
        512, ge=8, description="Tokens in a packed sequence."
    )
    long_records: LongRecords | None = Field(
        None,
        description="What becomes of a chat or pair with more than data.sequence_length tokens. "
        "cut: one row with its first tokens; if its prompt alone fills the row, the record is left "
        "out. drop: the record is left out. window: several rows, each with the end of what comes "
        "before it; not for preference. All are counted. None means cut. Other tasks have one way: "
        "causal_lm, masked_lm and denoising learn all of a text in windows, "
        "sequence_classification, multi_label_classification, sequence_regression, multi_task and "
        "text_embedding its beginning.",
    )
    train_on: TrainOn | None = Field(
        None,
        description="Only for supervised_finetuning: which tokens of a chat the model learns. "
        "assistant: what the assistant says, and the end of each turn. last_turn: of that, what "
        "comes after the last message of the user. all: every token but the first. Messages with "
        "weight 0 or train false are never learned. Evaluation scores what the assistant says; "
        "with last_turn, in the last turn. None means assistant.",
    )
    chat_template: str | None = Field(
        None,
        min_length=1,
        description="Chat template in Jinja, instead of the tokenizer's own: the path of a file, "
        "the template itself, which has {{ or {%, or the name chatml. It is saved with the "
        "tokenizer and exported with the model. Only for tasks with chats.",
    )
    max_record_bytes: int = Field(
        1_000_000,
        ge=1,
        description="Maximum size of a record in UTF-8 bytes. Longer records are quarantined.",
    )
    max_bad_share: float = Field(
        0.05, ge=0, le=1, description="Share of defective records above which the run stops."
    )
    near_duplicate_threshold: float | None = Field(
        0.85,
        gt=0,
        le=1,
        description="Jaccard similarity of 5-word shingles at which two records of the same label "
        "count as near duplicates. System messages and text that many records share do not count. "
        "Prompt and answer must each be similar. None turns the search off.",
    )
    validation_share: float = Field(
        0.05,
        gt=0,
        lt=1,
        description="Share of the records held out to choose the best model within a run, if the "
        "data have no validation split of their own.",
    )
    test_share: float = Field(
        0.05,
        gt=0,
        lt=1,
        description="Share of the records held out for evaluation and the gate, if the data have "
        "no test split of their own.",
    )
    split_salt: str = Field(
        "steadytrain", description="Salt of the split. A different salt gives a different split."
    )
    group_by_prompt: bool = Field(
        True,
        description="Whether all answers to one prompt go to the same side of the split, in chats "
        "and pairs without data.columns.group. The prompt is what comes before the first answer, "
        "without system messages; case counts, white space does not.",
    )

    @model_validator(mode="before")
    @classmethod
    def _source_is_that_of_the_parts(cls, content: Any) -> Any:
        parts = content.get("parts") if isinstance(content, dict) else None
        if not isinstance(parts, dict) or "source" in content:
            return content
        listed = [part.get("source") for part in parts.values() if isinstance(part, dict)]
        found = [address for each in listed if isinstance(each, list) for address in each]
        return {**content, "source": found} if found else content

    @field_validator("chat_template")
    @classmethod
    def _is_here(cls, given: str | None) -> str | None:
        if given is not None and not is_template(given) and not is_local(given):
            raise ValueError("is an address: give a file, or the template itself")
        return given

    @field_validator("task")
    @classmethod
    def _known_task(cls, task: str) -> str:
        if task != cls.model_fields["task"].default and ":" not in task:
            check_plugins(plugins.TASKS, [task], otherwise=", or give module:NAME")
        return task

    @model_validator(mode="after")
    def _built_in_tasks_have_no_options(self) -> DataConfig:
        if self.task_options and plugins.is_ours(plugins.TASKS, self.task):
            raise at_odds(
                "data.task_options",
                self.task_options,
                f"{self.task} has no options",
                "leave it out",
            )
        return self

    @model_validator(mode="after")
    def _columns_are_of_a_table(self) -> DataConfig:
        if not plugins.is_ours(plugins.TASKS, self.task):
            return self
        tables = (*TABLES, *MULTIMODAL)
        if self.task in (*tables, *SERIES) and self.target is None:
            raise at_odds(
                "data.target",
                None,
                f"{self.task} predicts a column",
                "name it, such as data.target=price",
            )
        if self.target in self.features:
            raise at_odds(
                "data.features",
                self.features,
                f"{self.target!r} is data.target, which is predicted",
                "leave it out",
            )
        if self.columns.weight in self.features:
            raise at_odds(
                "data.features",
                self.features,
                f"{self.columns.weight!r} is data.columns.weight, which no model learns from",
                "leave it out of one of the two",
            )
        if self.task in tables:
            return self
        names = ("features", "allow_leaks")
        for name in names if self.task in SERIES else ("target", *names):
            if value := getattr(self, name):
                raise at_odds(
                    f"data.{name}",
                    value,
                    f"{self.task} does not learn from the columns of a table",
                    f"leave it out, or use data.task {' or '.join(tables)}",
                )
        return self

    @model_validator(mode="after")
    def _images_are_of_the_task(self) -> DataConfig:
        reads = self.task in (*IMAGES, *MULTIMODAL) or not plugins.is_ours(plugins.TASKS, self.task)
        if self.images != ImagesConfig() and not reads:
            raise at_odds(
                "data.images",
                self.images.model_dump(exclude_defaults=True),
                f"{self.task} reads no images",
                f"leave it out, or use data.task {' or '.join((*IMAGES, *MULTIMODAL))}",
            )
        return self

    @model_validator(mode="after")
    def _series_are_of_the_task(self) -> DataConfig:
        given = self.series.model_dump(exclude_defaults=True)
        if self.task not in SERIES:
            if given and plugins.is_ours(plugins.TASKS, self.task):
                raise at_odds(
                    "data.series",
                    given,
                    f"{self.task} forecasts no series",
                    f"leave it out, or use data.task {' or '.join(SERIES)}",
                )
            return self
        if self.series.horizon is None:
            raise at_odds(
                "data.series.horizon",
                None,
                f"{self.task} predicts so many times ahead",
                "give their number, such as data.series.horizon=12",
            )
        series = self.series
        columns = self.target, series.time, series.column, *series.covariates
        if len({*columns}) < len(columns):
            raise at_odds(
                "data.series",
                given,
                f"data.target is {self.target!r}, and each needs a column of its own",
                "name other columns",
            )
        return self

    @model_validator(mode="after")
    def _prompts_group(self) -> DataConfig:
        if not self.group_by_prompt:
            ours = plugins.is_ours(plugins.TASKS, self.task)
            why = (
                f"data.columns.group is {self.columns.group!r}, which groups instead"
                if self.columns.group
                else f"records of {self.task} have no prompt"
                if ours and self.task not in ANSWERING
                else ""
            )
            if why:
                raise at_odds("data.group_by_prompt", False, why, "leave it out")
        return self

    @model_validator(mode="after")
    def _long_records_are_of_the_task(self) -> DataConfig:
        choices = _LONG.get(self.task, ())
        ours = plugins.is_ours(plugins.TASKS, self.task)
        if ours and self.long_records and self.long_records not in choices:
            raise at_odds(
                "data.long_records",
                self.long_records,
                f"{self.task} does not support it",
                f"use {' or '.join(choices)}, or leave it out" if choices else "leave it out",
            )
        return self

    @model_validator(mode="after")
    def _targets_are_of_chats(self) -> DataConfig:
        if (
            self.train_on
            and self.task != "supervised_finetuning"
            and plugins.is_ours(plugins.TASKS, self.task)
        ):
            raise at_odds(
                "data.train_on",
                self.train_on,
                f"{self.task} has its own targets",
                "leave it out, or use data.task supervised_finetuning",
            )
        return self

    @model_validator(mode="after")
    def _separated_labels_are_of_the_task(self) -> DataConfig:
        ours = plugins.is_ours(plugins.TASKS, self.task)
        if self.label_separator and self.task != MULTI_LABEL and ours:
            raise at_odds(
                "data.label_separator",
                self.label_separator,
                f"{self.task} has no lists of labels",
                f"leave it out, or use data.task {MULTI_LABEL}",
            )
        return self

    @model_validator(mode="after")
    def _columns_are_of_the_task(self) -> DataConfig:
        tasks = {
            "text_pair": _WITH_PAIRS,
            "input": ("supervised_finetuning",),
            "image": (*IMAGES, *MULTIMODAL),
            "weight": TABLES,
        }
        columns = {"data.columns": self.columns} | {
            f"data.parts.{name}.columns": part.columns for name, part in self.parts.items()
        }
        for name, readers in tasks.items():
            for place, given in columns.items():
                column = getattr(given, name)
                if (
                    column
                    and self.task not in readers
                    and plugins.is_ours(plugins.TASKS, self.task)
                ):
                    raise at_odds(
                        f"{place}.{name}",
                        column,
                        f"{self.task} does not read it",
                        f"leave it out, or use data.task {' or '.join(readers)}",
                    )
        return self

    @model_validator(mode="after")
    def _numbers_have_no_labels(self) -> DataConfig:
        if self.labels and self.task in ("sequence_regression", "tabular_regression"):
            raise at_odds(
                "data.labels",
                self.labels,
                f"{self.task} predicts numbers",
                "leave it out, or use data.task sequence_classification",
            )
        return self

    @property
    def fits_long_records(self) -> LongRecords | None:
        """What becomes of a record that is longer than a row; None if the task has its own way."""
        return self.long_records or ("cut" if self.task in _LONG else None)

    @property
    def grouped_by(self) -> str:
        """What the records of a group share: a column, "prompt", or "" if there are no groups."""
        prompt = "prompt" if self.group_by_prompt and self.task in ANSWERING else ""
        return self.columns.group or prompt

    @model_validator(mode="after")
    def _parts_are_read(self) -> DataConfig:
        takes = (MULTI_TASK, *MIXED)
        if (self.task not in takes) if self.parts else (self.task == MULTI_TASK):
            raise at_odds(
                "data.parts",
                list(self.parts),
                f"data.task is {self.task}",
                f"give the parts together with data.task {' or '.join(takes)}, or leave both out",
            )
        if len(self.parts) == 1:
            raise at_odds(
                "data.parts",
                list(self.parts),
                "is one data set",
                "give at least two, or use data.task sequence_classification"
                if self.task == MULTI_TASK
                else "give at least two, or data.source instead",
            )
        return self

    @model_validator(mode="after")
    def _addresses_are_listed_once(self) -> DataConfig:
        fields: dict[tuple[str, str], str] = {}
        for field, address in self.addresses:
            if self.parts and field in ("data.validation_source", "data.test_source"):
                raise at_odds(
                    field,
                    address,
                    "data.parts is set",
                    "leave it out, and add it to each part's source, in a file or folder with the "
                    "name of the side",
                )
            # Two parts may read the same data.
            key = (field if self.parts else "", address)
            if key in fields:
                raise at_odds(
                    field, address, f"{fields[key]} lists it already", "list each address once"
                )
            fields[key] = field
        return self

    @property
    def addresses(self) -> list[tuple[str, str]]:
        """Everything that is read: the field and the address."""
        sources = {f"parts.{name}.source": part.source for name, part in self.parts.items()} or {
            "source": self.source
        }
        sources |= {"validation_source": self.validation_source, "test_source": self.test_source}
        return [(f"data.{name}", address) for name, found in sources.items() for address in found]

    @model_validator(mode="after")
    def _parts_say_how_they_are_read(self) -> DataConfig:
        if not self.parts:
            return self
        expected = {
            "source": [address for part in self.parts.values() for address in part.source],
            "format": "auto",
            "columns": Columns(),
            "labels": None,
        }
        for name, value in expected.items():
            if getattr(self, name) != value:
                raise at_odds(
                    f"data.{name}",
                    getattr(self, name),
                    "each part has its own, because data.parts is set",
                    f"leave it out, and set data.parts.NAME.{name}",
                )
        for name, part in self.parts.items():
            if self.task in MIXED and part.labels is not None:
                raise at_odds(
                    f"data.parts.{name}.labels",
                    part.labels,
                    f"{self.task} has no labels",
                    "leave it out",
                )
            if part.columns.slice is not None:
                raise at_odds(
                    f"data.parts.{name}.columns.slice",
                    part.columns.slice,
                    "the parts are the slices",
                    "leave it out",
                )
        return self

    @property
    def mixture(self) -> tuple[str, ...]:
        """The parts of a language model's mixture, sorted; empty if there is none."""
        return tuple(sorted(self.parts)) if self.task in MIXED else ()

    def by_part(self) -> dict[str, DataConfig]:
        """Return the settings of each part alone, by name. Without parts: these, for ""."""
        found = {
            name: self.model_copy(update={**dict(part), "parts": {name: part}})
            for name, part in self.parts.items()
        }
        return found or {"": self}

    @property
    def part(self) -> str:
        """The part that these settings are of, if `by_part` returned them; otherwise ""."""
        return next(iter(self.parts)) if len(self.parts) == 1 else ""

    @model_validator(mode="after")
    def _something_to_train_on(self) -> DataConfig:
        if self.validation_share + self.test_share >= 0.9:
            raise at_odds(
                "data.test_share",
                self.test_share,
                f"with data.validation_share {self.validation_share:g} it leaves less than a tenth "
                "to train on",
                "lower one of the two",
            )
        return self


def is_template(text: str) -> bool:
    """Return whether text is a chat template, and not the path of one."""
    return "{{" in text or "{%" in text

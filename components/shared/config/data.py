"""The data that the run learns from, and the part held back for evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from steadytrain.components.shared import plugins
from steadytrain.components.shared.config.data_sections import (
    ANSWERING,
    IMAGES,
    IN_RULES,
    LABEL_SETS,
    MIXED,
    MULTI_LABEL,
    MULTI_TASK,
    MULTIMODAL,
    SERIES,
    TABLES,
    TABULAR_MULTI_LABEL,
    Addresses,
    Columns,
    CsvConfig,
    DataFormat,
    ImagesConfig,
    Labels,
    PartConfig,
    PartName,
    SeriesConfig,
    Source,
    listed,
)
from steadytrain.components.shared.effects import (
    Effect,
    IfSet,
    PlainJson,
    Section,
    at_odds,
    check_plugins,
    is_local,
)

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


def _source_or_parts(schema: dict[str, Any]) -> None:
    """Require one of the two. Python needs no default: parts become the source."""
    schema["anyOf"] = [{"required": [name]} for name in ("source", "parts")]
    schema["required"] = [name for name in schema["required"] if name != "source"]
    if not schema["required"]:
        del schema["required"]


_TABLES: Final = (*TABLES, *MULTIMODAL)
_NO_TABLE: Final = "does not learn from the columns of a table"
_READERS: Final[Mapping[str, tuple[Sequence[str], str]]] = {
    "task_options": ((), "has no options"),
    "target": ((*_TABLES, *SERIES), _NO_TABLE),
    "features": (_TABLES, _NO_TABLE),
    "allow_leaks": (_TABLES, _NO_TABLE),
    "images": ((*IMAGES, *MULTIMODAL), "reads no images"),
    "series": (SERIES, "forecasts no series"),
    "train_on": (("supervised_finetuning",), "has its own targets"),
    "label_separator": (LABEL_SETS, "has no lists of labels"),
}
"""Fields that only some of the built-in tasks read, with these tasks and why the others do not."""


class DataConfig(Section):
    """The data set: where it is, and how it is read, checked, split and packed."""

    model_config = ConfigDict(json_schema_extra=_source_or_parts)

    task: str = Field(
        "causal_lm",
        description="What to train for: causal_lm, supervised_finetuning, preference, masked_lm, "
        "denoising, text_embedding, sequence_classification, multi_label_classification, "
        "sequence_regression, multi_task, tabular_classification, tabular_regression, "
        "tabular_multi_label, image_classification, multimodal_classification, forecasting, the "
        "name of an installed package's task, or module:NAME for your own task.",
    )
    task_options: Annotated[PlainJson, Effect.ROWS] = Field(
        {},
        description="Settings of the task itself, such as the columns that a package's task "
        "reads. The built-in tasks have none.",
    )
    source: Annotated[Source, Effect.SOURCE] = Field(
        ...,
        description="Where the data are: files, folders, globs, s3:// addresses, hub:NAME for a "
        "data set on a hub, mlflow-dataset:RUN_ID for one that an MLflow run has logged, or "
        "package:NAME for the files of an installed Python package "
        "(package:stdlib is the standard library).",
    )
    validation_source: Annotated[Addresses, Effect.SOURCE, IN_RULES] = Field(
        [],
        description="Where the validation side is, as for data.source. Empty: the data's own split "
        "(data.splits), or data.validation_share of the training records.",
    )
    test_source: Annotated[Addresses, Effect.SOURCE, IN_RULES] = Field(
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
    target: Annotated[Annotated[str, Field(min_length=1)] | Labels | None, IfSet()] = Field(
        None,
        description="For tables, multimodal_classification and forecasting: the column to predict. "
        "For tabular_multi_label, it has lists of labels, or texts with data.label_separator; or "
        "several columns, each of which is a label and has 1 where a record has it, otherwise 0.",
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
        description="Only for multi_label_classification and tabular_multi_label: what is between "
        "two labels in a column of text, as in CSV files; spaces around a label do not count, and "
        "an empty text has no label. None means that the column has lists, and that a text is one "
        "label.",
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
        sources = [listed(part.get("source")) for part in parts.values() if isinstance(part, dict)]
        addresses = [address for each in sources if isinstance(each, list) for address in each]
        return {**content, "source": addresses} if addresses else content

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
    def _fields_are_of_the_task(self) -> DataConfig:
        if not plugins.is_ours(plugins.TASKS, self.task):
            return self
        for name, (readers, why) in _READERS.items():
            value = getattr(self, name)
            if isinstance(value, Section):
                value = value.model_dump(exclude_defaults=True)
            if value and self.task not in readers:
                other = f", or use data.task {' or '.join(readers)}" if readers else ""
                raise at_odds(f"data.{name}", value, f"{self.task} {why}", f"leave it out{other}")
        return self

    @property
    def targets(self) -> list[str]:
        """The columns to predict."""
        return [self.target] if isinstance(self.target, str) else self.target or []

    @model_validator(mode="after")
    def _columns_are_of_a_table(self) -> DataConfig:
        if not plugins.is_ours(plugins.TASKS, self.task):
            return self
        if self.task in (*TABLES, *MULTIMODAL, *SERIES) and self.target is None:
            raise at_odds(
                "data.target",
                None,
                f"{self.task} predicts a column",
                "name it, such as data.target=price",
            )
        if shared := [name for name in self.targets if name in self.features]:
            raise at_odds(
                "data.features",
                self.features,
                f"{shared[0]!r} is data.target, which is predicted",
                "leave it out",
            )
        if self.columns.weight in self.features:
            raise at_odds(
                "data.features",
                self.features,
                f"{self.columns.weight!r} is data.columns.weight, which no model learns from",
                "leave it out of one of the two",
            )
        return self

    @model_validator(mode="after")
    def _several_targets_are_labels(self) -> DataConfig:
        if not isinstance(self.target, list):
            return self
        if self.task != TABULAR_MULTI_LABEL:
            raise at_odds(
                "data.target",
                self.target,
                f"{self.task} predicts one column",
                f"name one, or use data.task {TABULAR_MULTI_LABEL}",
            )
        for name in ("labels", "label_separator"):
            if value := getattr(self, name):
                raise at_odds(
                    f"data.{name}",
                    value,
                    "the columns in data.target are the labels",
                    "leave it out",
                )
        return self

    @model_validator(mode="after")
    def _series_are_of_the_task(self) -> DataConfig:
        if self.task not in SERIES:
            return self
        if self.series.horizon is None:
            raise at_odds(
                "data.series.horizon",
                None,
                f"{self.task} predicts so many times ahead",
                "give their number, such as data.series.horizon=12",
            )
        series = self.series
        columns = *self.targets, series.time, series.column, *series.covariates
        if len({*columns}) < len(columns):
            raise at_odds(
                "data.series",
                self.series.model_dump(exclude_defaults=True),
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
            for section, given in columns.items():
                column = getattr(given, name)
                if (
                    column
                    and self.task not in readers
                    and plugins.is_ours(plugins.TASKS, self.task)
                ):
                    raise at_odds(
                        f"{section}.{name}",
                        column,
                        f"{self.task} does not read it",
                        f"leave it out, or use data.task {' or '.join(readers)}",
                    )
        for section, given in columns.items():
            if self.task in IMAGES and isinstance(given.image, list):
                raise at_odds(
                    f"{section}.image",
                    given.image,
                    f"{self.task} learns from one image of a record",
                    f"name one column, or use data.task {' or '.join(MULTIMODAL)}",
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
        return [(f"data.{name}", address) for name, result in sources.items() for address in result]

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
        columns = {
            name: self.model_copy(update={**dict(part), "parts": {name: part}})
            for name, part in self.parts.items()
        }
        return columns or {"": self}

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

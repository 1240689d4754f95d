"""The fields of the data section. `data.py` has the rules about which of them go together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from steadytrain.components.shared import plugins
from steadytrain.components.shared.config.data_sections import (
    ANSWERING,
    IN_RULES,
    MIXED,
    SERIES,
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
    Use,
    check_plugins,
    is_local,
)

LongRecords = Literal["cut", "drop", "window"]
LONG_RECORDS: Final[Mapping[str, tuple[LongRecords, ...]]] = {
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


class DataFields(Section):
    """The data set: where it is, and how it is read, checked, split and packed."""

    model_config = ConfigDict(json_schema_extra=_source_or_parts)

    task: Annotated[str, Use.MEMORY] = Field(
        "causal_lm",
        description="What to train for: causal_lm, supervised_finetuning, preference, masked_lm, "
        "denoising, text_embedding, sequence_classification, multi_label_classification, "
        "sequence_regression, multi_task, tabular_classification, tabular_regression, "
        "tabular_multi_label, image_classification, multimodal_classification, forecasting, the "
        "name of an installed package's task, or module:NAME for your own task.",
    )
    task_options: Annotated[PlainJson, Effect.ROWS, Use.MEMORY] = Field(
        {},
        description="Settings of the task itself, such as the columns that a package's task "
        "reads. The built-in tasks have none.",
    )
    source: Annotated[Source, Effect.SOURCE] = Field(
        ...,
        description="Where the data are: files, folders, globs, s3:// addresses, hub:NAME for a "
        "data set on a hub, mlflow-dataset:RUN_ID for one that an MLflow run has logged, "
        "feast:FOLDER?service=NAME&entities=FILE for a table of a feature store, or "
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
        "target, data.columns.group, slice, weight and time. Columns that identify a record or "
        "that have one value are left out and reported.",
    )
    images: ImagesConfig = ImagesConfig()
    series: SeriesConfig = SeriesConfig()
    categories: Annotated[list[str], IfSet()] = Field(
        [],
        description="Only for tables: columns whose values are categories although they look like "
        "numbers or dates, such as postal codes.",
    )
    allow_leaks: Annotated[list[str], IfSet()] = Field(
        [],
        description="Only for tables, and for data.series.covariates: columns to learn from "
        "although they identify a record, or give the target of every record away.",
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

    @property
    def targets(self) -> list[str]:
        """The columns to predict."""
        return [self.target] if isinstance(self.target, str) else self.target or []

    @property
    def fits_long_records(self) -> LongRecords | None:
        """What becomes of a record that is longer than a row; None if the task has its own way."""
        return self.long_records or ("cut" if self.task in LONG_RECORDS else None)

    @property
    def grouped_by(self) -> str:
        """What the records of a group share: a column, "prompt", or "" if there are no groups."""
        prompt = "prompt" if self.group_by_prompt and self.task in ANSWERING else ""
        return self.columns.group or prompt

    @property
    def in_time(self) -> bool:
        """Whether split and folds follow time, instead of being random."""
        return self.task in SERIES or self.columns.time is not None

    @property
    def addresses(self) -> list[tuple[str, str]]:
        """Everything that is read: the field and the address."""
        sources = {f"parts.{name}.source": part.source for name, part in self.parts.items()} or {
            "source": self.source
        }
        sources |= {"validation_source": self.validation_source, "test_source": self.test_source}
        return [(f"data.{name}", address) for name, result in sources.items() for address in result]

    @property
    def mixture(self) -> tuple[str, ...]:
        """The parts of a language model's mixture, sorted; empty if there is none."""
        return tuple(sorted(self.parts)) if self.task in MIXED else ()

    def by_part(self) -> dict[str, Self]:
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


def is_template(text: str) -> bool:
    """Return whether text is a chat template, and not the path of one."""
    return "{{" in text or "{%" in text

"""The sections of `data`: columns, formats, data sets, images and time series. Groups of tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from steadytrain.components.shared.effects import (
    Address,
    Effect,
    IfSet,
    Section,
    Use,
    at_odds,
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
COMPRESSIONS: Final = (".gz", ".zst")
IN_RULES: Final = IfSet(but=Use.GATE)
"""Marks the fields that decisions of the gate counted before runs did."""
PartName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]


def suffix_of(path: str) -> str:
    """Return the suffix of a file's format, without that of a compression."""
    name = PurePosixPath(path)
    return PurePosixPath(name.stem).suffix if name.suffix.lower() in COMPRESSIONS else name.suffix


def listed(source: Any) -> Any:
    """Return the list of one for a single address or name, and anything else unchanged."""
    return [source] if isinstance(source, str) else source


Addresses = Annotated[
    list[Address], BeforeValidator(listed, json_schema_input_type=Address | list[Address])
]
Source = Annotated[Addresses, Field(min_length=1)]


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


def _named_once(names: list[str]) -> list[str]:
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"the column {twice[0]!r} is listed twice: list it once")
    if "" in names:
        raise ValueError("a column has no name: leave it out")
    return names


ColumnNames = Annotated[list[str], Field(min_length=1), AfterValidator(_named_once)]


class Columns(Section):
    """Which input column holds what. Only the columns that the task needs are read."""

    text: str = Field("text", description="Column with the text to learn from or to classify.")
    text_pair: Annotated[str | None, IN_RULES] = Field(
        None,
        description="For sequence_classification, sequence_regression and "
        "multi_label_classification: column with a second text, such as the hypothesis for a "
        "premise. The tokenizer encodes both as a pair. None means that there is one text.",
    )
    image: Annotated[str | ColumnNames | None, IfSet()] = Field(
        None,
        description="For image_classification: column of a table with the name of an image's file, "
        "relative to the folder of the table, or with the content of the file. None means that the "
        "files of data.source are the images, and that their folders are the classes. For "
        "multimodal_classification, also a list of such columns, and None means all columns that "
        "have images.",
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
    time: Annotated[str | None, IfSet()] = Field(
        None,
        min_length=1,
        description="For tables: column with the time of a record, a date or time in ISO 8601 or a "
        "number. The latest records are the test side, those before them the validation side, and "
        "folds follow each other in time. No model learns from it unless data.features names it. "
        "None means that the split is random.",
    )

    @property
    def images(self) -> list[str]:
        """The columns that `image` names."""
        return listed(self.image) if self.image else []


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


class ImagesConfig(Section):
    """The pixels of images: their number, colors and scale."""

    size: Annotated[int, Effect.ROWS, IfSet(), Use.MEMORY] = Field(
        224,
        ge=8,
        le=2048,
        description="Width and height of what the model reads, in pixels. Images are resized to it "
        "when data are prepared. Pretrained models need their own, often 224.",
    )
    color: Annotated[Literal["rgb", "gray"], Effect.ROWS, IfSet()] = Field(
        "rgb", description="Whether the model reads three channels, or one in shades of gray."
    )
    resize: Annotated[Literal["crop", "pad", "stretch"], Effect.ROWS, IfSet()] = Field(
        "crop",
        description="How an image that is not square becomes square. crop: its middle. pad: all of "
        "it, between black bars. stretch: all of it, distorted.",
    )
    interpolation: Annotated[
        Literal["bilinear", "bicubic", "lanczos", "nearest"], Effect.ROWS, IfSet()
    ] = Field(
        "bilinear",
        description="How images are resized. Many pretrained models, such as timm's, have learned "
        "from bicubic ones; a run reports where model.base says another.",
    )
    max_pixels: Annotated[int, IfSet()] = Field(
        100_000_000,
        ge=1,
        le=178_000_000,
        description="Pixels above which a file is quarantined before it is decoded, as a small "
        "file may hold more than the memory does.",
    )
    normalization: Annotated[Literal["data", "model"] | None, Effect.LEARNED, IfSet()] = Field(
        None,
        description="Mean and deviation of each channel, which pixels are scaled by. data: those "
        "of the training side. model: those in model.base's preprocessor_config.json, or timm's "
        "for the model. None means model if model.base has them, and data otherwise.",
    )

    @property
    def channels(self) -> int:
        """The number of channels."""
        return 3 if self.color == "rgb" else 1


class SeriesConfig(Section):
    """The time series of a table with a record for each time of each series."""

    column: Annotated[str | None, IfSet()] = Field(
        None,
        min_length=1,
        description="Column with the name of a record's series. None means that all records are of "
        "one series.",
    )
    time: Annotated[str, IfSet()] = Field(
        "time",
        min_length=1,
        description="Column with the time of a record: a date or time in ISO 8601, such as "
        "2024-05-31 or 20240531, or a whole number, such as a year. How often a series has a value "
        "is inferred from it.",
    )
    horizon: Annotated[int | None, IfSet()] = Field(
        None,
        ge=1,
        description="Times ahead to forecast. The last ones of each series are the test side, and "
        "as many before those are the validation side.",
    )
    season: Annotated[int | None, IfSet()] = Field(
        None,
        ge=1,
        description="Times after which a pattern repeats, such as 12 for months. None means that "
        "of the frequency: 24 for hours, 7 for days, 5 for business days, 52 for weeks, 12 for "
        "months, 4 for quarters, and 1, which is no season, for years and whole numbers.",
    )
    covariates: Annotated[list[str], IfSet()] = Field(
        [],
        description="Columns of numbers that are known of the future too, such as a planned price "
        "or whether a day is a holiday (1 or 0). Forecasts need them for each time ahead.",
    )


MULTI_LABEL: Final = "multi_label_classification"
"""The task whose records have any number of labels."""
TABULAR_MULTI_LABEL: Final = "tabular_multi_label"
"""The task of a table whose records have any number of labels."""
LABEL_SETS: Final = (MULTI_LABEL, TABULAR_MULTI_LABEL)
"""The tasks whose records have any number of labels."""
TABLES: Final = ("tabular_classification", "tabular_regression", TABULAR_MULTI_LABEL)
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
MULTIMODAL: Final = ("multimodal_classification",)
"""The tasks that learn from texts, images and columns of a table together."""
IMAGES: Final = ("image_classification",)
"""The tasks that learn from images."""
SERIES: Final = ("forecasting",)
"""The tasks that forecast time series."""
TEXTS: Final = ("sequence_classification",)
"""The tasks that learn the class of a text."""
NETWORKS: Final = (*IMAGES, *MULTIMODAL, *TEXTS)
"""The tasks whose searches compare networks that PyTorch trains."""
SEARCHED: Final = (*TABLES, *SERIES, *NETWORKS)
"""The tasks that `automl` finds models for."""

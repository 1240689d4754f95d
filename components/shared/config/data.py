"""The data that the run learns from, and the part held back for evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from pydantic import Field, field_validator, model_validator

from steadytrain.components.shared import plugins
from steadytrain.components.shared.config.base import (
    Address,
    PlainJson,
    Section,
    at_odds,
    check_plugins,
)

DataFormat = Literal["auto", "jsonl", "json", "csv", "parquet", "text", "source", "arrow"]

SUFFIXES: Final[Mapping[str, DataFormat]] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".txt": "text",
    ".arrow": "arrow",
}
"""The format of a file by its suffix."""


class Columns(Section):
    """Which input column holds what. Only the columns that the task needs are read."""

    text: str = Field("text", description="Column with the text to learn from or to classify.")
    messages: str = Field(
        "messages", description="Column with a conversation: a list of {role, content}."
    )
    prompt: str = Field(
        "prompt",
        description="Column with the text before the completion. It does not count in the loss.",
    )
    completion: str = Field(
        "completion", description="Column with the answer that the model learns."
    )
    chosen: str = Field(
        "chosen", description="Column with the preferred answer, as text or as messages."
    )
    rejected: str = Field("rejected", description="Column with the other answer.")
    label: str = Field("label", description="Column with the class of the text.")
    group: str | None = Field(
        None,
        description="Column with a group name. Records of the same group go to the same side "
        "of the split. None means no groups.",
    )
    slice: str | None = Field(
        None,
        description="Column whose values define slices. Metrics are also reported for each slice. "
        "None means no slices.",
    )


class DataConfig(Section):
    """The data set: where it is, and how it is read, checked, split and packed."""

    task: str = Field(
        "causal_lm",
        description="What to train for: causal_lm, supervised_finetuning, preference, masked_lm, "
        "sequence_classification, the name of an installed package's task, or module:NAME for "
        "your own task.",
    )
    task_options: PlainJson = Field(
        {},
        description="Settings of the task itself, such as the columns that a package's task "
        "reads. The built-in tasks have none.",
    )
    source: Annotated[list[Address], Field(min_length=1)] = Field(
        ...,
        description="Where the data are: files, folders, globs, s3:// addresses, hub:NAME for a "
        "data set on a hub, or package:NAME for the files of an installed Python package "
        "(package:stdlib is the standard library).",
    )
    format: DataFormat = Field(
        "auto", description="Format of the files. auto: chosen by each file's suffix."
    )
    suffixes: list[str] = Field(
        default=[".py"], description="Suffixes of the files to read from a source tree."
    )
    exclude: list[str] = Field(
        default=[], description="Globs of files to leave out, relative to the source."
    )
    columns: Columns = Columns()
    labels: list[str] | None = Field(
        None, description="Labels that may occur. None means the labels in the training data."
    )
    sequence_length: int = Field(512, ge=8, description="Tokens in a packed sequence.")
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
        description="Jaccard similarity of 5-word shingles at which two records count as near "
        "duplicates. None turns the search off.",
    )
    validation_share: float = Field(
        0.05,
        gt=0,
        lt=1,
        description="Share of the records held out to choose the best model within a run.",
    )
    test_share: float = Field(
        0.05, gt=0, lt=1, description="Share of the records held out for evaluation and the gate."
    )
    split_salt: str = Field(
        "steadytrain", description="Salt of the split. A different salt gives a different split."
    )

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

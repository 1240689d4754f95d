"""What the run learns from, and what is held back to judge it by."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from steadytrain.components.shared.config.base import Section, at_odds

DataFormat = Literal["auto", "jsonl", "json", "csv", "parquet", "text", "source", "arrow"]


class Columns(Section):
    """Which column of the input holds what. Only those that the task needs are read."""

    text: str = Field("text", description="the text to learn from or to classify")
    messages: str = Field("messages", description="a list of {role, content}")
    prompt: str = Field("prompt", description="what precedes the completion; not in the loss")
    completion: str = Field("completion", description="what the model learns to answer")
    label: str = Field("label", description="the class of the text")
    group: str | None = Field(
        None, description="records of one group land on the same side of the split"
    )
    slice: str | None = Field(None, description="metrics are also given for each value of it")


class DataConfig(Section):
    """The data set: where it lies, how it is read, checked, split and packed."""

    task: str = Field(
        "causal_lm",
        description="causal_lm, supervised_finetuning, sequence_classification, "
        "or module:Class of a task of your own",
    )
    source: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] = Field(
        ...,
        description="files, folders, globs, s3:// addresses, hub:NAME of a data set, or "
        "package:NAME for the files of an installed Python package "
        "(package:stdlib is the standard library)",
    )
    format: DataFormat = Field("auto", description="auto goes by the file's suffix")
    suffixes: list[str] = Field(
        default=[".py"], description="which files of a source tree are read"
    )
    exclude: list[str] = Field(
        default=[], description="globs, relative to the source, of files to leave out"
    )
    columns: Columns = Columns()
    labels: list[str] | None = Field(
        None, description="the labels that may occur; none: those of the training side"
    )
    sequence_length: int = Field(512, ge=8, description="tokens in a packed sequence")
    max_record_bytes: int = Field(
        1_000_000, ge=1, description="a longer record is quarantined (UTF-8 bytes)"
    )
    max_bad_share: float = Field(
        0.05, ge=0, le=1, description="share of defective records above which the run stops"
    )
    near_duplicate_threshold: float | None = Field(
        0.85, gt=0, le=1, description="Jaccard similarity of 5-word shingles; none: not looked for"
    )
    validation_share: float = Field(0.05, gt=0, lt=1)
    test_share: float = Field(0.05, gt=0, lt=1)
    split_salt: str = Field("steadytrain", description="another salt gives another split")

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

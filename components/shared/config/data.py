"""The data that the run learns from, and which settings of it go together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from pydantic import model_validator

from steadytrain.components.shared import plugins
from steadytrain.components.shared.config.data_fields import LONG_RECORDS, DataFields
from steadytrain.components.shared.config.data_sections import (
    ANSWERING,
    IMAGES,
    LABEL_SETS,
    MIXED,
    MULTI_LABEL,
    MULTI_TASK,
    MULTIMODAL,
    SERIES,
    SUFFIXES,
    TABLES,
    TABULAR_MULTI_LABEL,
    Columns,
    suffix_of,
)
from steadytrain.components.shared.effects import Section, at_odds

_WITH_PAIRS: Final = ("sequence_classification", "sequence_regression", MULTI_LABEL)
"""The tasks that read two texts together."""

_TABLES: Final = (*TABLES, *MULTIMODAL)
_WITH_TARGET: Final = (*_TABLES, *SERIES)
_NO_TABLE: Final = "does not learn from the columns of a table"
_READERS: Final[Mapping[str, tuple[Sequence[str], str]]] = {
    "task_options": ((), "has no options"),
    "target": (_WITH_TARGET, _NO_TABLE),
    "features": (_TABLES, _NO_TABLE),
    "categories": (_TABLES, _NO_TABLE),
    "allow_leaks": (_WITH_TARGET, _NO_TABLE),
    "images": ((*IMAGES, *MULTIMODAL), "reads no images"),
    "series": (SERIES, "forecasts no series"),
    "train_on": (("supervised_finetuning",), "has its own targets"),
    "label_separator": (LABEL_SETS, "has no lists of labels"),
}
"""Fields that only some of the built-in tasks read, with these tasks and why the others do not."""


def _fields_are_of_the_task(data: DataFields) -> None:
    if not plugins.is_ours(plugins.TASKS, data.task):
        return
    for name, (readers, why) in _READERS.items():
        value = getattr(data, name)
        if isinstance(value, Section):
            value = value.model_dump(exclude_defaults=True)
        if value and data.task not in readers:
            other = f", or use data.task {' or '.join(readers)}" if readers else ""
            raise at_odds(f"data.{name}", value, f"{data.task} {why}", f"leave it out{other}")


def _columns_are_of_a_table(data: DataFields) -> None:
    if not plugins.is_ours(plugins.TASKS, data.task):
        return
    if data.task in _WITH_TARGET and data.target is None:
        raise at_odds(
            "data.target",
            None,
            f"{data.task} predicts a column",
            "name it, such as data.target=price",
        )
    if shared := [name for name in data.targets if name in data.features]:
        raise at_odds(
            "data.features",
            data.features,
            f"{shared[0]!r} is data.target, which is predicted",
            "leave it out",
        )
    if data.columns.weight in data.features:
        raise at_odds(
            "data.features",
            data.features,
            f"{data.columns.weight!r} is data.columns.weight, which no model learns from",
            "leave it out of one of the two",
        )


def _time_divides_alone(data: DataFields) -> None:
    time = data.columns.time
    if time is None or not plugins.is_ours(plugins.TASKS, data.task):
        return
    if time in data.targets:
        raise at_odds(
            "data.columns.time",
            time,
            "it is data.target, which is predicted",
            "name the column with the time of a record",
        )
    others = {
        "columns.group": data.columns.group,
        "validation_source": data.validation_source,
        "test_source": data.test_source,
        **{
            name: value
            for name in ("splits", "split_salt")
            if (value := getattr(data, name)) != DataFields.model_fields[name].default
        },
    }
    for name, value in others.items():
        if value:
            raise at_odds(
                f"data.{name}",
                value,
                f"data.columns.time is {time!r}, which alone decides the side of a record",
                "leave one of the two out",
            )


def _several_targets_are_labels(data: DataFields) -> None:
    if not isinstance(data.target, list):
        return
    if data.task != TABULAR_MULTI_LABEL:
        raise at_odds(
            "data.target",
            data.target,
            f"{data.task} predicts one column",
            f"name one, or use data.task {TABULAR_MULTI_LABEL}",
        )
    for name in ("labels", "label_separator"):
        if value := getattr(data, name):
            raise at_odds(
                f"data.{name}",
                value,
                "the columns in data.target are the labels",
                "leave it out",
            )


def _series_are_of_the_task(data: DataFields) -> None:
    if data.task not in SERIES:
        return
    series = data.series
    if series.horizon is None:
        raise at_odds(
            "data.series.horizon",
            None,
            f"{data.task} predicts so many times ahead",
            "give their number, such as data.series.horizon=12",
        )
    columns = *data.targets, series.time, series.column, *series.covariates
    if len({*columns}) < len(columns):
        raise at_odds(
            "data.series",
            series.model_dump(exclude_defaults=True),
            f"data.target is {data.target!r}, and each needs a column of its own",
            "name other columns",
        )
    if {*data.allow_leaks} - {*series.covariates}:
        raise at_odds(
            "data.allow_leaks",
            data.allow_leaks,
            f"data.series.covariates is {series.covariates}, and nothing else is learned from",
            "name only covariates",
        )


def _prompts_group(data: DataFields) -> None:
    if not data.group_by_prompt:
        ours = plugins.is_ours(plugins.TASKS, data.task)
        why = (
            f"data.columns.group is {data.columns.group!r}, which groups instead"
            if data.columns.group
            else f"records of {data.task} have no prompt"
            if ours and data.task not in ANSWERING
            else ""
        )
        if why:
            raise at_odds("data.group_by_prompt", False, why, "leave it out")


def _long_records_are_of_the_task(data: DataFields) -> None:
    choices = LONG_RECORDS.get(data.task, ())
    ours = plugins.is_ours(plugins.TASKS, data.task)
    if ours and data.long_records and data.long_records not in choices:
        raise at_odds(
            "data.long_records",
            data.long_records,
            f"{data.task} does not support it",
            f"use {' or '.join(choices)}, or leave it out" if choices else "leave it out",
        )


def _columns_are_of_the_task(data: DataFields) -> None:
    tasks = {
        "text_pair": _WITH_PAIRS,
        "input": ("supervised_finetuning",),
        "image": (*IMAGES, *MULTIMODAL),
        "weight": TABLES,
        "time": TABLES,
    }
    columns = {"data.columns": data.columns} | {
        f"data.parts.{name}.columns": part.columns for name, part in data.parts.items()
    }
    for name, readers in tasks.items():
        for section, given in columns.items():
            column = getattr(given, name)
            if column and data.task not in readers and plugins.is_ours(plugins.TASKS, data.task):
                raise at_odds(
                    f"{section}.{name}",
                    column,
                    f"{data.task} does not read it",
                    f"leave it out, or use data.task {' or '.join(readers)}",
                )
    for section, given in columns.items():
        if data.task in IMAGES and isinstance(given.image, list):
            raise at_odds(
                f"{section}.image",
                given.image,
                f"{data.task} learns from one image of a record",
                f"name one column, or use data.task {' or '.join(MULTIMODAL)}",
            )


def _numbers_have_no_labels(data: DataFields) -> None:
    if data.labels and data.task in ("sequence_regression", "tabular_regression"):
        raise at_odds(
            "data.labels",
            data.labels,
            f"{data.task} predicts numbers",
            "leave it out, or use data.task sequence_classification",
        )


def _records_are_no_text(data: DataFields) -> None:
    for part in data.by_part().values():
        for field, address in part.addresses if part.format == "source" else ():
            suffix = suffix_of(address)
            of_records = SUFFIXES.get(suffix.lower(), "text")
            if of_records == "text" or suffix in data.suffixes:
                continue
            section = f"data.parts.{part.part}" if part.part else "data"
            column = f", and {section}.columns.slice to null" if part.columns.slice else ""
            raise at_odds(
                f"{section}.format",
                part.format,
                f"{field} has {address}, whose records would become one text",
                f"set {section}.format to {of_records}{column}; to learn each such file as a text, "
                f"add {suffix} to data.suffixes",
            )


def _parts_are_read(data: DataFields) -> None:
    takes = (MULTI_TASK, *MIXED)
    if (data.task not in takes) if data.parts else (data.task == MULTI_TASK):
        raise at_odds(
            "data.parts",
            list(data.parts),
            f"data.task is {data.task}",
            f"give the parts together with data.task {' or '.join(takes)}, or leave both out",
        )
    if len(data.parts) == 1:
        raise at_odds(
            "data.parts",
            list(data.parts),
            "is one data set",
            "give at least two, or use data.task sequence_classification"
            if data.task == MULTI_TASK
            else "give at least two, or data.source instead",
        )


def _addresses_are_listed_once(data: DataFields) -> None:
    fields: dict[tuple[str, str], str] = {}
    for field, address in data.addresses:
        if data.parts and field in ("data.validation_source", "data.test_source"):
            raise at_odds(
                field,
                address,
                "data.parts is set",
                "leave it out, and add it to each part's source, in a file or folder with the "
                "name of the side",
            )
        # Two parts may read the same data.
        key = (field if data.parts else "", address)
        if key in fields:
            raise at_odds(
                field, address, f"{fields[key]} lists it already", "list each address once"
            )
        fields[key] = field


def _parts_have_settings_of_their_own(data: DataFields) -> None:
    if not data.parts:
        return
    expected = {
        "source": [address for part in data.parts.values() for address in part.source],
        "format": "auto",
        "columns": Columns(),
        "labels": None,
    }
    for name, value in expected.items():
        if getattr(data, name) != value:
            raise at_odds(
                f"data.{name}",
                getattr(data, name),
                "each part has its own, because data.parts is set",
                f"leave it out, and set data.parts.NAME.{name}",
            )
    for name, part in data.parts.items():
        if data.task in MIXED and part.labels is not None:
            raise at_odds(
                f"data.parts.{name}.labels",
                part.labels,
                f"{data.task} has no labels",
                "leave it out",
            )
        if part.columns.slice is not None:
            raise at_odds(
                f"data.parts.{name}.columns.slice",
                part.columns.slice,
                "the parts are the slices",
                "leave it out",
            )


def _something_to_train_on(data: DataFields) -> None:
    if data.validation_share + data.test_share >= 0.9:
        raise at_odds(
            "data.test_share",
            data.test_share,
            f"with data.validation_share {data.validation_share:g} it leaves less than a tenth "
            "to train on",
            "lower one of the two",
        )


_RULES: Final = (
    _fields_are_of_the_task,
    _columns_are_of_a_table,
    _time_divides_alone,
    _several_targets_are_labels,
    _series_are_of_the_task,
    _prompts_group,
    _long_records_are_of_the_task,
    _columns_are_of_the_task,
    _numbers_have_no_labels,
    _records_are_no_text,
    _parts_are_read,
    _addresses_are_listed_once,
    _parts_have_settings_of_their_own,
    _something_to_train_on,
)


class DataConfig(DataFields):
    """The data set: where it is, and how it is read, checked, split and packed."""

    @model_validator(mode="after")
    def _follows_the_rules(self) -> DataConfig:
        for rule in _RULES:
            rule(self)
        return self

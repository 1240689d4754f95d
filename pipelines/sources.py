"""What a command is given to run: a preset, a configuration, or data.

For data, a look at the first records finds the task, and the task's preset does the rest. Nothing
is guessed: if the records suit several tasks, the error lists them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from steadytrain.components.shared.config import RunConfig, load, preset_names
from steadytrain.components.shared.config.data_sections import (
    IMAGES,
    MULTI_LABEL,
    MULTIMODAL,
    SERIES,
    SUFFIXES,
    TABLES,
)
from steadytrain.components.shared.config.document import assign, stated_fields
from steadytrain.components.shared.config.load import Override, override_items, read_mapping
from steadytrain.components.shared.effects import DATA_KINDS
from steadytrain.components.shared.errors import BadInput, DataError

PRESETS: Final = {
    "causal_lm": "causal-lm",
    "supervised_finetuning": "chat",
    "preference": "preference",
    "unpaired_preference": "preference",
    "sequence_classification": "sequence-classification",
    MULTI_LABEL: "sequence-classification",
    "sequence_regression": "sequence-classification",
    **dict.fromkeys(TABLES, "tabular"),
    **dict.fromkeys(SERIES, "series"),
    **dict.fromkeys(IMAGES, "images"),
    **dict.fromkeys(MULTIMODAL, "multimodal"),
}
"""The preset of each task that data can be given for, which data.task is set in."""
Overrides = Iterable[Override] | Mapping[str, Any]
_CONFIGURATIONS: Final = (".yaml", ".yml")
_WEIGHTS: Final = ("*.safetensors", "pytorch_model*.bin")


@dataclass(frozen=True)
class Selection:
    """A configuration, and where its values come from.

    layers: what each source states, by full field name, from the weakest source to the strongest.
    remarks: for data, what was found in them and chosen for them, one sentence each.
    """

    config: RunConfig
    layers: Sequence[tuple[str, frozenset[str]]]
    remarks: Sequence[str] = ()

    def origin(self, field: str) -> str:
        """Return the source of a field's value, or of the strongest value in a section."""
        for name, stated in reversed(self.layers):
            if any(overlap(field, other) for other in stated):
                return name
        return "default"


def open_source(source: str, overrides: Sequence[Override]) -> Selection:
    """Return the configuration for what a user names: a preset, a YAML file, or data.

    Raises:
        BadInput: there is nothing with that name, or the task of the data is not clear.
        ConfigError: with every problem in the configuration.
    """
    if is_data(source):
        return for_task(source, *find_task(source, overrides), overrides)
    name = f"preset {source}" if source in preset_names() else source
    return Selection(
        load(source, overrides), [(name, stated_fields(read_mapping(source))), *_options(overrides)]
    )


def is_data(source: str) -> bool:
    """Return whether a name stands for data, and not for a preset or a configuration."""
    if source in preset_names() or source.endswith(_CONFIGURATIONS):
        return False
    if source.partition(":")[0] in DATA_KINDS or set(source) & set("*?["):
        return True
    suffixes = PurePosixPath(source.lower()).suffixes
    return bool(set(suffixes[-2:]) & SUFFIXES.keys()) or _is_folder(source)


_ONLY: Final = {
    "data.columns.text_pair": "sequence_classification",
    "data.columns.input": "supervised_finetuning",
    "data.label_separator": MULTI_LABEL,
}
"""The task by a field that only this one reads."""


def find_task(source: str, overrides: Sequence[Override]) -> tuple[str, str]:
    """Return the task of data, and the reason.

    Raises:
        BadInput: the task is not clear, or this is not data.
    """
    try:
        from steadytrain.components.preprocess.inspection import (
            check_classes,
            inspect,
            reason,
            task_of,
        )
    except ModuleNotFoundError as error:
        raise BadInput(
            f"{source}: data cannot be read without the package {error.name}",
            remedy="pip install 'steadytrain[data]', or write a configuration",
        ) from error
    _check_no_model(source)
    given = dict(override_items(overrides))
    field = next((name for name in ("data.task", *_ONLY) if given.get(name)), "data.task")
    task = given.get("data.task") or _ONLY.get(field)
    if task is None and given.get("data.target"):
        return task_of_target(content_of(source, overrides)["data"])
    if task is None and (count := pictures(source)):
        return IMAGES[0], f"its {count:,} files are images"
    if task is None:
        # The preset only completes the configuration, so that `data` is checked as a whole. Other
        # fields are for the task's own preset.
        stated = [item for item in given.items() if item[0].partition(".")[0] == "data"]
        data = load("causal-lm", [*_basis(source, "causal_lm"), *stated]).data
        return task_of(inspect(data), data)
    if task not in PRESETS:
        raise BadInput(
            f"data.task = {task!r} has no preset",
            remedy=f"one of {', '.join(PRESETS)}, or write a configuration",
        )
    if task in (*TABLES, *SERIES, *IMAGES, *MULTIMODAL):
        return task, f"{field} says so"
    data = load(PRESETS[task], [*_basis(source, task), *overrides]).data
    try:
        result = inspect(data)
    except (BadInput, DataError):
        # The task is clear, so that records that cannot be read are an error of preprocessing.
        return task, f"{field} says so"
    if task == "sequence_classification":
        check_classes(result, data)
    return task, f"{field} says so; {reason(result, task)}"


def content_of(source: str | Path, overrides: Overrides) -> dict[str, Any]:
    """Return a configuration as plain data, which nothing has checked or completed."""
    content: dict[str, Any] = {"data": {"source": [str(source)]}}
    if not is_data(str(source)):
        content = read_mapping(source) if source else {}
    for field, value in override_items(overrides):
        assign(content, field, value)
    return content


def pictures(source: str) -> int:
    """Return how many files a folder on this machine has, if all are images; otherwise 0."""
    from steadytrain.components.images.encoder import SUFFIXES as OF_IMAGES

    if not _is_folder(source):
        return 0
    files = [one for one in Path(source).rglob("[!.]*") if one.is_file()]
    return len(files) if all(one.suffix.lower() in OF_IMAGES for one in files) else 0


def task_of_target(data: Mapping[str, Any]) -> tuple[str, str]:
    """Return the task that predicts `data.target`, and the reason."""
    if data.get("series"):
        return SERIES[0], "data.series is set"
    # Imported late, with pyarrow.
    from steadytrain.components.automl.task import task_of

    return task_of(data)


def for_task(source: str, task: str, reason: str, overrides: Sequence[Override]) -> Selection:
    """Return the configuration of a task's preset with other data.

    Raises:
        ConfigError: with every problem in the configuration.
    """
    preset, basis = PRESETS[task], _basis(source, task)
    config = load(preset, [*basis, *overrides])
    training = config.training
    length = (
        f"{training.max_steps:,} steps"
        if training.max_steps > 0
        else f"{training.num_train_epochs:g} epochs"
    )
    remarks = [
        f"{source}: task {task}, since {reason}",
        f"preset {preset}: {length}, {config.model.base or 'a new model'}",
        "change a field with --set FIELD=VALUE, or write a configuration with "
        f"`steadytrain init --data {shlex.quote(source)}`",
    ]
    if task in (*TABLES, *SERIES):
        remarks.append("`steadytrain automl` with the same arguments compares models")
    layers = [
        (f"preset {preset}", stated_fields(read_mapping(preset))),
        (source, frozenset(field for field, _ in override_items(basis))),
        *_options(overrides),
    ]
    return Selection(config, layers, remarks)


def _basis(source: str, task: str) -> list[Override]:
    """Return the overrides that put other data into a preset."""
    return [
        ("data.task", task),
        ("name", name_for(source)),
        ("data.source", [source]),
        ("data.format", "auto"),
        ("data.exclude", []),
        ("data.columns", {}),
        *([("data.target", None)] if task in (*TABLES, *SERIES, *MULTIMODAL) else []),
        *([("data.series", {})] if task in SERIES else []),
    ]


def name_for(address: str) -> str:
    """Return a valid name of a run for an address: its last part, without suffixes."""
    last = re.split(r"[/:]", address.partition("?")[0].rstrip("/"))[-1]
    plain = re.sub(r"[^a-z0-9]+", "-", last.lower().partition(".")[0]).strip("-")
    return plain[:40].strip("-") or "run"


def _options(overrides: Sequence[Override]) -> Iterator[tuple[str, frozenset[str]]]:
    for item in overrides:
        ((field, _),) = override_items([item])
        yield "--set" if isinstance(item, str) else "command line", frozenset({field})


def overlap(field: str, other: str) -> bool:
    """Return whether one of two fields is the other, or a section that has it."""
    return field == other or field.startswith(f"{other}.") or other.startswith(f"{field}.")


def _is_folder(source: str) -> bool:
    try:
        return Path(source).is_dir()
    except OSError:
        return False


def _check_no_model(source: str) -> None:
    folder = Path(source)
    if not _is_folder(source) or not (folder / "config.json").is_file():
        return
    if any(path for pattern in _WEIGHTS for path in folder.glob(pattern)):
        raise BadInput(
            f"{source} is a model, not data",
            remedy=f"name your data, and the model as --set model.base={source}",
        )

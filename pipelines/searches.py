"""What `automl` is given to search: its task, and what the task's preset and the data complete.

Three fields suffice. A remark says what was chosen for the others, and names what a user gives and
a search does not use.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from steadytrain.components.automl.portfolio import MONOTONE, chosen_fields
from steadytrain.components.automl.task import checked
from steadytrain.components.shared.config import RunConfig, from_mapping, load, preset_names
from steadytrain.components.shared.config.data_sections import (
    IMAGES,
    MULTIMODAL,
    NETWORKS,
    SEARCHED,
    SERIES,
    TABLES,
    TEXTS,
    listed,
)
from steadytrain.components.shared.config.document import stated_fields
from steadytrain.components.shared.config.load import read_mapping
from steadytrain.components.shared.config.tune import TuneConfig
from steadytrain.components.shared.errors import BadInput, ConfigError, DataError, StorageError
from steadytrain.components.tasks.encoding.fields import Defect
from steadytrain.pipelines.pod_names import Pipeline
from steadytrain.pipelines.sources import (
    PRESETS,
    Overrides,
    content_of,
    name_for,
    overlap,
    pictures,
    task_of_target,
)

_OF_TUNE: Final = ("seed", "log", "max_failed_share")
"""Fields of `tune` that a search reads."""
_CHOSEN: Final = (
    "training.learning_rate",
    "training.early_stopping_patience",
    "training.load_best_model_at_end",
    "training.metric_for_best_model",
    "training.greater_is_better",
    *("cross_validation.folds", "cross_validation.repeats", "cross_validation.compare"),
    "ablation",
    *(f"tune.{name}" for name in TuneConfig.model_fields if name not in _OF_TUNE),
)
"""What a search sets itself."""
_OF_LEARNERS: Final = (
    "training.max_steps",
    "training.num_train_epochs",
    "training.eval_steps",
    "model",
)
"""What it sets too where it compares learners of tables and series."""
_OF_NETWORKS: Final = ("images", "sequence_length", "near_duplicate_threshold")
"""Fields of `data` that the tasks of tables do not read."""
_OF_PRESET: Final = ("max_record_bytes", "sequence_length")
"""Fields of `data` that the preset of a network's task sets."""
_OF_MIXED: Final = (
    *("source", "format", "csv", "exclude", "target", "features", "images"),
    *("max_record_bytes", "max_bad_share"),
)
"""Fields of `data` that say how mixed records are read."""
_COLUMNS: Final = ("text", "image", "group", "slice")
_OF_IMAGES: Final = ("missing_file", "broken_image", "huge_image", "too_long")
"""Defects of records whose images are not read."""
_ROWS: Final = 60
"""Records that show what images and columns there are. Photographs take a while to decode."""
_LARGEST: Final = 64
"""Pixels on a side up to which networks from scratch read images, if nothing else is set."""
_GRAY: Final = frozenset({"1", "L", "LA", "I", "I;16", "F"})
"""Pillow's modes of images without colors."""


def configuration_for(
    pipeline: Pipeline, source: str | Path, overrides: Overrides
) -> tuple[RunConfig, list[str]]:
    """Return the configuration of a pipeline's run, and remarks on what was chosen.

    Raises:
        BadInput, ConfigError: see `load` and `searched`.
    """
    return searched(source, overrides) if pipeline == "automl" else (load(source, overrides), [])


def searched(source: str | Path, overrides: Overrides) -> tuple[RunConfig, list[str]]:
    """Return the configuration of a run, whose task is inferred, and what was chosen.

    Args:
        source: a preset, a YAML file or data; empty if the overrides name the data.

    Raises:
        BadInput: no data or no target are named, or they cannot be read.
        ConfigError: with every problem.
    """
    content = content_of(source, overrides)
    data = content.setdefault("data", {})
    if not data.get("source"):
        raise _missing("source")
    content.setdefault("name", name_for(str(listed(data["source"])[0])))
    remarks, found = list[str](), None
    if "task" not in data:
        data["task"], reason, found = _task(data)
        remarks.append(f"task {data['task']}, since {reason}; data.task sets another one")
    if found and found.defect and not found.images:
        remarks.append(f"no image is learned from: {found.defect}")
    task = data["task"]
    if not data.get("target") and task not in (*IMAGES, *TEXTS):
        raise _missing("target")
    given = content_of("" if str(source) in preset_names() else source, overrides)
    if unused := sorted(_not_used(stated_fields(given), task)):
        kept = (
            "model.base, encoders and other fields of training hold for all"
            if task in NETWORKS
            else "automl.constraints.frameworks limits it, and model.config.monotone holds for all"
        )
        chosen = f"not used: {', '.join(unused)}. A search sets these itself"
        remarks.insert(0, f"{chosen}; {kept}")
    if task in NETWORKS:
        remarks += _complete(content, given, found)
    else:
        content["model"] = _learner(content)
    if task not in SERIES:
        data.setdefault("validation_share", 0.1)
        data.setdefault("test_share", 0.2)
    config = from_mapping(content)
    if config.data.task not in SEARCHED:
        raise BadInput(
            f"data.task = {config.data.task!r}: a search finds models of tables, series, images "
            "and texts",
            remedy=f"use {' or '.join(SEARCHED)}",
        )
    return config, remarks


def _missing(field: str) -> BadInput:
    return BadInput(
        f"data.{field} is missing: a search needs a table and the column to predict, or a folder "
        "that has a folder of images for each class",
        remedy="name both, such as `steadytrain automl FILE --set data.target=COLUMN`; for a table "
        "of images or texts, set data.task and the columns (data.columns)",
    )


def _task(data: dict[str, Any]) -> tuple[str, str, _Kinds | None]:
    """Return the task of data, the reason, and what columns they have, if it has a target.

    Images with a class alone are named in the data.

    Raises:
        BadInput: it cannot be inferred.
        DataError: the records are defective.
    """
    if not data.get("target"):
        if count := sum(pictures(str(one)) for one in listed(data["source"])):
            return IMAGES[0], f"its {count:,} files are images", None
        raise _missing("target")
    columns = data.get("columns")
    named = isinstance(columns, Mapping) and columns.get("image")
    try:
        task, reason = task_of_target(_of_table(data))
        found = _first_kinds(data)
    except (ConfigError, DataError):
        raise
    except (BadInput, StorageError) as error:
        raise BadInput(
            f"data.task is missing, and the data cannot be read here: {error.message}",
            remedy=f"set data.task to {' or '.join(TABLES)}, or fix this: {error.remedy}",
        ) from error
    if task != "tabular_classification" and (named or found.images):
        what = f"data.columns.image = {named!r}" if named else f"the column {found.images[0]!r}"
        raise BadInput(
            f"{what} has images, and {reason}, so the task is {task}, which learns from no images",
            remedy="set data.task: multimodal_classification to take each value for a class, or "
            "leave the images out with data.features",
        )
    if named or (len(found.images) and found.others):
        return MULTIMODAL[0], f"{found.images[0] if found.images else named} has images", found
    if found.images:
        data["columns"] = {**(columns or {}), "image": found.images[0], "label": data["target"]}
        del data["target"]
        return IMAGES[0], f"{found.images[0]} has images, and there is nothing else", found
    return task, reason, found


def _of_table(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of data that the tasks of tables read."""
    result = {name: value for name, value in data.items() if name not in _OF_NETWORKS}
    if isinstance(columns := data.get("columns"), Mapping):
        kept = {name: it for name, it in columns.items() if name not in ("image", "text")}
        result["columns"] = kept
    return result


def _not_used(stated: frozenset[str], task: str) -> Iterator[str]:
    """Yield the fields that a user states and a search sets itself."""
    chosen = {*_CHOSEN, *(chosen_fields(task) if task in NETWORKS else _OF_LEARNERS)}
    for field in stated:
        kept = field == f"model.config.{MONOTONE}" or field.startswith(f"model.config.{MONOTONE}.")
        if any(overlap(field, other) for other in chosen) and (task in NETWORKS or not kept):
            yield field


def _learner(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model of a search for learners: only `MONOTONE` is the user's."""
    model = content.get("model")
    stated = model.get("config") if isinstance(model, dict) else None
    settings = stated if isinstance(stated, dict) else {}
    kept = {name: value for name, value in settings.items() if name == MONOTONE}
    framework = "mlforecast" if content["data"]["task"] in SERIES else "lightgbm"
    return {"framework": framework, "config": {"model_type": "lightgbm", **kept}}


def _complete(content: dict[str, Any], given: Mapping[str, Any], found: _Kinds | None) -> list[str]:
    """Complete the configuration of a search for networks, and return remarks.

    What the preset of the task says about training counts where the user says nothing.

    Args:
        given: what the user says, without a preset that is the source.
        found: what columns the records have, if that is known.
    """
    data, preset = content["data"], read_mapping(PRESETS[content["data"]["task"]])
    task, model = data["task"], _section(given, "model")
    training = _section(content, "training")
    content["training"] = {**preset["training"], **training}
    if "save_strategy" in training and "save_steps" not in training:
        del content["training"]["save_steps"]
    for name in _OF_PRESET:
        if name in preset["data"]:
            data.setdefault(name, preset["data"][name])
    if task in TEXTS:
        base = model.get("base", None if model.get("config") else preset["model"]["base"])
        content["model"] = _started({**model, "base": base}, {"model_type": "bert"})
        return [f"model.base {base}: it is fine-tuned" if base else "networks are from scratch"]
    # A preset's size is that of its own images.
    data["images"] = _section(_section(given, "data"), "images")
    if task in IMAGES:
        content["model"] = _started(model, preset["model"]["config"])
        return [*_sized(data, model.get("base"))]
    return [*_mixed(content, model, preset["model"], found)]


def _section(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a section; what is none is an error of the whole configuration."""
    section = content.get(name)
    return dict(section) if isinstance(section, Mapping) else {}


def _started(model: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model that starts from its base or, without one, from scratch.

    The families replace its configuration.
    """
    return {**model, "config": {} if model.get("base") else dict(config)}


def _sized(data: Mapping[str, Any], base: Any) -> Iterator[str]:
    """Set the size and color of the images that nothing sets, and yield what they are."""
    images = data["images"]
    if base or {"size", "color"} <= images.keys():
        return
    sides, modes, where = list[int](), set[str](), ""
    try:
        sides, modes = _first_images(data)
    except (BadInput, DataError, StorageError) as error:
        where = f", since they cannot be read here ({error.message})"
    smaller = int(statistics.median(sides)) if sides else _LARGEST
    images.setdefault("size", max(8, min(_LARGEST, smaller)))
    images.setdefault("color", "gray" if modes and modes <= _GRAY else "rgb")
    yield (
        f"images are read at {images['size']} x {images['size']} pixels, {images['color']}"
        f"{where}; data.images sets another size and color"
    )


def _first_images(data: Mapping[str, Any]) -> tuple[list[int], set[str]]:
    """Return the shorter sides of the first images, and their modes."""
    from steadytrain.components.images.pixels import Unreadable, decoded
    from steadytrain.components.preprocess.inspection import first_rows

    sides, modes = list[int](), set[str]()
    config = checked(data)
    column = next(iter(config.columns.images), "image")
    with closing(first_rows(config, _ROWS)) as rows:
        for _, _, row in rows:
            value = row.get(column) if isinstance(row, Mapping) else None
            content = value.get("bytes") if isinstance(value, Mapping) else value
            if isinstance(content, bytes):
                # A broken one is quarantined later.
                with suppress(Unreadable):
                    image, mode = decoded(content, config.images.max_pixels)
                    sides.append(min(image.size))
                    modes.add(mode)
    return sides, modes


def _mixed(
    content: dict[str, Any],
    given: dict[str, Any],
    preset: Mapping[str, Any],
    found: _Kinds | None,
) -> Iterator[str]:
    """Set the encoders for what the records have, and yield what was found.

    Args:
        given: what the user says about the model.
        preset: the model of the task's preset.
        found: see `_complete`.
    """
    data, fusion = content["data"], _section(given, "fusion")
    try:
        found = found or _first_kinds(data)
        yield f"{found}. data.columns.text and data.columns.image name others"
    except (BadInput, DataError, StorageError) as error:
        found = _Kinds(texts=["?"], images=["?"])
        yield (
            f"texts and images are expected, since the records cannot be read here "
            f"({error.message}); without texts, set model.base: null, and without images "
            "model.fusion: {}"
        )
    if found.texts and not given.get("config"):
        given.setdefault("base", preset["base"])
    if found.images and "fusion" not in given:
        given["fusion"] = preset["fusion"]
    elif found.images and fusion and not {"image", "image_base"} & fusion.keys():
        given["fusion"] = {**preset["fusion"], **fusion}
    content["model"] = given
    if not fusion.get("image_base"):
        data["images"].setdefault("size", _LARGEST)


@dataclass(frozen=True)
class _Kinds:
    """What columns the first records have.

    defect: why a first record with an image cannot be read; "" if none is.
    """

    texts: Sequence[str]
    images: Sequence[str]
    others: Sequence[str] = ()
    defect: str = ""

    def __str__(self) -> str:
        kinds = {"texts": self.texts, "images": self.images}
        known = [f"{kind}: {', '.join(names)[:200]}" for kind, names in kinds.items() if names]
        return "; ".join(known) or "there are no texts and no images"


def _first_kinds(data: Mapping[str, Any]) -> _Kinds:
    """Return what columns the first records have besides the target.

    Raises:
        BadInput, DataError, StorageError: they cannot be read.
    """
    from steadytrain.components.multimodal.encoder import MultimodalEncoder, parted
    from steadytrain.components.preprocess.inspection import first_rows
    from steadytrain.components.tabular.columns import Target, inferred

    columns = _section(data, "columns")
    if columns.get("weight") or columns.get("time") or isinstance(data["target"], list):
        # Only tables have these.
        return _Kinds((), ())
    read = {name: data[name] for name in _OF_MIXED if name in data}
    read["columns"] = {name: columns[name] for name in _COLUMNS if name in columns}
    largest = read_mapping(PRESETS[MULTIMODAL[0]])["data"]["max_record_bytes"]
    config = checked({"max_record_bytes": largest, **read, "task": MULTIMODAL[0]})
    encoder, records, labels = MultimodalEncoder(config), list[Any](), list[str]()
    images, defect = dict[str, None](), ""
    with closing(first_rows(config, _ROWS)) as rows:
        for _, _, row in rows:
            try:
                if isinstance(row, Defect):
                    raise row
                # Whether the target is a class is another question.
                content = encoder.read({**row, encoder.target: "any"})
            except Defect as found:
                if found.reason in _OF_IMAGES:
                    defect = defect or found.detail
                continue
            stored = json.loads(content.text)
            images |= dict.fromkeys(parted(stored["columns"]))
            records.append(stored["record"])
            labels.append(str(row.get(encoder.target)))
    names = dict.fromkeys(name for record in records for name in record if name not in images)
    values = {name: [record.get(name) for record in records] for name in names}
    places = {label: place for place, label in enumerate(dict.fromkeys(labels))}
    target = Target(encoder.target, [np.array([places[it] for it in labels])], numbers=False)
    kinds = inferred(values, target, text=config.columns.text).features
    texts = [name for name, kind in kinds.items() if kind == "text"]
    return _Kinds(texts, [*images], [*names], defect)

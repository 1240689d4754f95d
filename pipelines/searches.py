"""What `automl` is given to search: its task, and what the task's preset and the data complete.

Three fields suffice. A remark says what was chosen for the others, and names what a user gives and
a search does not use.
"""

from __future__ import annotations

import io
import json
import statistics
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
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
    SERIES,
    TABLES,
    TEXTS,
    listed,
)
from steadytrain.components.shared.config.document import stated_fields
from steadytrain.components.shared.config.load import read_mapping
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

_CHOSEN: Final = (
    "training.learning_rate",
    "training.early_stopping_patience",
    "training.load_best_model_at_end",
    "training.metric_for_best_model",
)
"""What a search chooses for each configuration."""
_OF_LEARNERS: Final = (
    "training.max_steps",
    "training.num_train_epochs",
    "training.eval_steps",
    "model",
)
"""What it chooses too where it compares learners of tables and series."""
_OF_NETWORKS: Final = ("images", "sequence_length", "near_duplicate_threshold")
"""Fields of `data` that the tasks of tables do not read."""
_ROWS: Final = 200
"""Records that show what images and columns there are."""
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
    remarks = []
    if "task" not in data:
        data["task"], reason = _task(data)
        remarks.append(f"task {data['task']}, since {reason}; data.task sets another one")
    task = data["task"]
    if not data.get("target") and task not in (*IMAGES, *TEXTS):
        raise _missing("target")
    given = content_of("" if str(source) in preset_names() else source, overrides)
    if unused := sorted(_not_used(stated_fields(given), task)):
        remarks.insert(
            0,
            f"not used: {', '.join(unused)}. A search chooses these for each configuration; "
            "automl.constraints.frameworks limits it, and model.config.monotone holds for all",
        )
    if task in NETWORKS:
        remarks += _complete(content, given.get("model") or {})
    else:
        content["model"] = _learner(content)
    if task not in SERIES:
        data.setdefault("validation_share", 0.1)
        data.setdefault("test_share", 0.2)
    config = from_mapping(content)
    known = (*TABLES, *SERIES, *NETWORKS)
    if config.data.task not in known:
        raise BadInput(
            f"data.task = {config.data.task!r}: a search finds models of tables, series, images "
            "and texts",
            remedy=f"use {' or '.join(known)}",
        )
    return config, remarks


def _missing(field: str) -> BadInput:
    return BadInput(
        f"data.{field} is missing: a search needs a table and the column to predict, or a folder "
        "that has a folder of images for each class",
        remedy="name both, such as `steadytrain automl FILE --set data.target=COLUMN`; for a table "
        "of images or texts, set data.task and the columns (data.columns)",
    )


def _task(data: Mapping[str, Any]) -> tuple[str, str]:
    """Return the task of data, and the reason."""
    columns = data.get("columns") or {}
    if data.get("target"):
        if isinstance(columns, Mapping) and columns.get("image"):
            return MULTIMODAL[0], "data.columns.image is set"
        try:
            found = {name: it for name, it in data.items() if name not in _OF_NETWORKS}
            task, reason = task_of_target(found)
            if task == "tabular_classification" and (images := _first_kinds(data)[1]):
                return MULTIMODAL[0], f"{images[0]} has images"
            return task, reason
        except ConfigError:
            raise
        except (BadInput, StorageError) as error:
            raise BadInput(
                f"data.task is missing, and the data cannot be read here: {error.message}",
                remedy=f"set data.task to {' or '.join(TABLES)}, or fix this: {error.remedy}",
            ) from error
    if count := sum(pictures(str(one)) for one in listed(data["source"])):
        return IMAGES[0], f"its {count:,} files are images"
    raise _missing("target")


def _not_used(stated: frozenset[str], task: str) -> Iterator[str]:
    """Yield the fields that a user states and a search chooses."""
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


def _complete(content: dict[str, Any], model: Any) -> list[str]:
    """Complete the configuration of a search for networks, and return remarks.

    What the preset of the task says about training counts where the user says nothing.

    Args:
        model: what the user says about the model.
    """
    data, preset = content["data"], read_mapping(PRESETS[content["data"]["task"]])
    task, given = data["task"], dict(model) if isinstance(model, dict) else {}
    content["training"] = {**preset["training"], **(content.get("training") or {})}
    for name in ("max_record_bytes", "sequence_length"):
        if name in preset["data"]:
            data.setdefault(name, preset["data"][name])
    if task in TEXTS:
        base = given.get("base", None if given.get("config") else preset["model"]["base"])
        content["model"] = _started({**given, "base": base}, {"model_type": "bert"})
        return [f"model.base {base}: it is fine-tuned" if base else "networks are from scratch"]
    if task in IMAGES:
        content["model"] = _started(given, preset["model"]["config"])
        return [*_sized(data, given.get("base"))]
    return [*_mixed(content, given, preset["model"])]


def _started(model: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model that starts from its base or, without one, from scratch.

    The families replace its configuration.
    """
    return {**model, "config": {} if model.get("base") else dict(config)}


def _sized(data: dict[str, Any], base: Any) -> Iterator[str]:
    """Set the size and color of the images that nothing sets, and yield what they are."""
    images = data.setdefault("images", {})
    if base or not isinstance(images, dict) or {"size", "color"} <= images.keys():
        return
    try:
        sides, modes = _first_images(data)
    except (BadInput, DataError, StorageError):
        # They are not on this machine.
        return
    if not sides:
        return
    size = max(8, min(_LARGEST, int(statistics.median(sides))))
    images.setdefault("size", size)
    images.setdefault("color", "gray" if modes <= _GRAY else "rgb")
    yield (
        f"images are read at {images['size']} x {images['size']} pixels, {images['color']}; "
        "data.images sets another size and color"
    )


def _first_images(data: Mapping[str, Any]) -> tuple[list[int], set[str]]:
    """Return the shorter sides of the first images, and their modes."""
    from PIL import Image

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
                with suppress(OSError, ValueError), Image.open(io.BytesIO(content)) as image:
                    sides.append(min(image.size))
                    modes.add(image.mode)
    return sides, modes


def _mixed(
    content: dict[str, Any], given: dict[str, Any], preset: Mapping[str, Any]
) -> Iterator[str]:
    """Set the encoders for what the records have, and yield what was found.

    Args:
        given: what the user says about the model.
        preset: the model of the task's preset.
    """
    data, fusion = content["data"], given.get("fusion")
    found = None
    with suppress(BadInput, DataError, StorageError):
        # They may not be on this machine. Then both kinds are expected.
        found = _first_kinds(data)
    texts, images = found or (["?"], ["?"])
    if texts and not given.get("config"):
        given.setdefault("base", preset["base"])
    if images and isinstance(fusion or {}, dict):
        own = {"image", "image_base"} & (fusion or {}).keys()
        given["fusion"] = {**({} if own else preset["fusion"]), **(fusion or {})}
    content["model"] = given
    pretrained = (given.get("fusion") or {}).get("image_base")
    if not pretrained and isinstance(data.setdefault("images", {}), dict):
        data["images"].setdefault("size", _LARGEST)
    if found:
        kinds = [("texts", texts), ("images", images)]
        known = [f"{kind}: {', '.join(names)[:200]}" for kind, names in kinds if names]
        yield f"{'; '.join(known)}. data.columns.text and data.columns.image name others"


def _first_kinds(data: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the columns of the first records that are text, and those that have images."""
    from steadytrain.components.multimodal.encoder import MultimodalEncoder, parted
    from steadytrain.components.preprocess.inspection import first_rows
    from steadytrain.components.tabular.columns import Target, inferred

    config = checked({**data, "task": MULTIMODAL[0]})
    encoder, records, labels = MultimodalEncoder(config), list[Any](), list[Any]()
    images = dict[str, None]()
    with closing(first_rows(config, _ROWS)) as rows:
        for _, _, row in rows:
            with suppress(Defect):
                if isinstance(row, Defect):
                    continue
                read = encoder.read(row)
                stored = json.loads(read.text)
                images |= dict.fromkeys(parted(stored["columns"]))
                records.append(stored["record"])
                labels.append(str(read.label))
    columns = {
        name: [record.get(name) for record in records]
        for record in records
        for name in record
        if name not in images
    }
    classes = {label: place for place, label in enumerate(dict.fromkeys(labels))}
    target = Target(encoder.target, [np.array([classes[it] for it in labels])], numbers=False)
    table = inferred(columns, target, text=config.columns.text)
    return [name for name, kind in table.features.items() if kind == "text"], [*images]

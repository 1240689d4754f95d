"""The prepared data of a study's trials: shared, pinned for the whole study, without a test side.

Trials whose data fields are equal get the same record. So the data of a study do not change, even
if its source does. The record's folder holds links to the files of the training and the validation
side, and nothing else. Trials that hold out folds of the same data share the encoded files. There,
the fold that a trial holds out takes the place of the test side.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.digest import value_digest
from steadytrain.components.shared.effects import Use
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.lock import lock
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.shared.retry import FOREVER
from steadytrain.components.tune.trials.folder import trials_of

_RUN: Final = "prepare"
"""The run in the study's folder that prepares the data."""


def known_data(study: Path, config: RunConfig) -> DataRecord | None:
    """Return the data of a trial; None if they are not prepared."""
    try:
        record = DataRecord.load(data_path(study, config))
    except BadInput:
        return None
    return record if Path(record.folder).is_dir() else None


def prepare_data(study: Path, config: RunConfig) -> None:
    """Prepare the data of a trial, unless they are. Another process that does so is waited for.

    Raises:
        BadInput, DataError, StorageError: as for the preprocess step.
    """
    # Imported late: not every trial prepares data, and the libraries take seconds.
    from steadytrain.components.preprocess.step import run as preprocess

    own = config.model_copy(update={"output": str(study), "run": _RUN})
    _share(study, config, lambda: preprocess(own))


def share_data(study: Path, config: RunConfig, data: DataRecord) -> None:
    """Give trials data that are prepared already, unless the study has its own.

    Args:
        data: the preprocess step's record for this configuration, with a folder on the same file
            system as the study.
    """
    _share(study, config, lambda: data)


def _share(study: Path, config: RunConfig, prepared: Callable[[], DataRecord]) -> None:
    path, whole = data_path(study, config), data_path(study, _without_fold(config))
    # One lock for all folds, so that the data are encoded once.
    with lock(str(path.parent), whole.stem, wait_seconds=FOREVER):
        if known_data(study, config) is None:
            share = without_test if config.cross_validation.fold is None else linked
            share(prepared(), path.with_suffix("")).save(path)


def _without_fold(config: RunConfig) -> RunConfig:
    chosen = config.cross_validation.model_copy(update={"fold": None})
    return config.model_copy(update={"cross_validation": chosen})


def without_test(data: DataRecord, folder: Path) -> DataRecord:
    """Return the record without what names the test side, or is counted from it.

    Training uses neither, so a run with this record has the same weights.

    Args:
        folder: as for `linked`.
    """
    sides = {name: side for name, side in data.sides.items() if name != "test"}
    own = data.model_copy(update={"sides": sides, "test_records": "", "profile": None})
    return linked(own, folder)


def linked(data: DataRecord, folder: Path) -> DataRecord:
    """Return the record with another folder, which has links to the files that it names.

    Args:
        folder: of the new record, on the same file system. What is there is removed first.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    named = (name for side in data.sides.values() for name in (*side.shards, side.index))
    for name in filter(None, [*named, data.test_records]):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        os.link(data.path(name), target)
    if data.tokenizer:
        source, target = data.path(data.tokenizer), folder / data.tokenizer
        shutil.copytree(source, target, copy_function=os.link)
    return data.model_copy(update={"folder": str(folder)})


def data_path(study: Path, config: RunConfig) -> Path:
    """Return the file of the record that trials with these data share."""
    # The model decides about the tokenizer and the length of rows. Models with other layers prepare
    # again, and the preprocess step finds the data that it prepared before.
    fields = {
        "data": config.counted(Use.GATE)["data"],
        "model": config.counted(Use.TRAINING)["model"],
        **config.counted(Use.RUN).get("cross_validation", {}),
    }
    if column := config.training.curriculum.column:
        fields["difficulty"] = column
    if config.training.augmentation.on:
        fields["texts"] = True
    return trials_of(study) / "data" / f"{value_digest(fields)}.json"

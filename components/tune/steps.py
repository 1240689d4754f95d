"""The optimizer steps of a full trial, if a configuration gives epochs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.fidelity import fidelity_problems
from steadytrain.components.shared.config.load import validated
from steadytrain.components.shared.errors import ConfigError
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.sizing.length import prepared, total_steps
from steadytrain.components.tune.fold_design import is_cross_validation, with_fold
from steadytrain.components.tune.log import Log
from steadytrain.components.tune.study import study_name, study_of
from steadytrain.components.tune.trials.data import known_data, prepare_data

UNKNOWN: Final = "known once the data are prepared"
"""What a dry run says of steps that follow from epochs."""


def with_steps(
    config: RunConfig,
    log: Log,
    folder: Path,
    tell: Callable[[str], object],
    data: DataRecord | None = None,
) -> RunConfig:
    """Return a study's configuration with `training.max_steps`, the steps of a full trial.

    A study cuts its trials at optimizer steps. Epochs are counted once, on the training side of the
    prepared data: in a cross-validation, without the first fold. The study keeps the number.

    Args:
        log: of the study, which this process holds.
        folder: of the study. The data are prepared there, unless they are.
        tell: receives a line for people.
        data: prepared data for the trials, if there are some.

    Raises:
        ConfigError: with so many steps, the study is not possible.
        BadInput, DataError, StorageError: as for the preprocess step, or the log is damaged.
    """
    if config.training.max_steps > 0:
        return config
    if records := log.read():
        return _limited(config, study_of(records)[0].training.max_steps)
    base = _base(config)
    data = data or known_data(folder, base)
    if data is None:
        tell(f"preparing the data: training.num_train_epochs is {_epochs(config)}")
        prepare_data(folder, base)
        data = known_data(folder, base)
        assert data is not None
    steps = total_steps(config.training, data.sides["train"].rows)
    tell(f"a trial has {steps:,} steps: training.num_train_epochs is {_epochs(config)}")
    return _limited(config, steps)


def with_known_steps(config: RunConfig, folder: Path) -> RunConfig | None:
    """Return the same without preparing anything; None if no data are prepared yet."""
    if config.training.max_steps > 0:
        return config
    data = known_data(folder, _base(config)) or prepared(config)
    if data is None:
        return None
    return _limited(config, total_steps(config.training, data.sides["train"].rows))


def _limited(config: RunConfig, steps: int) -> RunConfig:
    training = config.training.model_copy(update={"max_steps": steps})
    # The name has the digest of the configuration as it is, with epochs.
    named = config.model_copy(update={"training": training, "run": study_name(config)})
    found = validated(named.model_dump(mode="json"))
    if problems := list(fidelity_problems(found)):
        raise ConfigError(problems)
    return found


def _base(config: RunConfig) -> RunConfig:
    return with_fold(config, 0) if is_cross_validation(config) else config


def _epochs(config: RunConfig) -> str:
    return f"{config.training.num_train_epochs:g}"

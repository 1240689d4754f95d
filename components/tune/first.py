"""The parameters that a study tries first: what is known to work."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from steadytrain.components.shared.config import Dimension, RunConfig, load
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.registry.versions import RUN, Registry
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.tune.history import Params
from steadytrain.components.tune.log import open_log
from steadytrain.components.tune.space import in_order, varies
from steadytrain.components.tune.study import logs_address, studies_folder, study_of

TAKEN_OVER: Final = 5
"""How many trials of another study are tried again."""


def first_trials(config: RunConfig, other: str = "") -> list[Params]:
    """Return the parameters of the first trials.

    Trial 0 has the champion's parameters, or the configuration's own if there is no champion. Then
    come the best trials of another study.

    Args:
        other: the other study's name, in the same output folder or, with `tune.log`, at the same
            address; "" for none.

    Raises:
        BadInput: there is no such study.
        TrackingError: the registry cannot be used.
    """
    known = champion(config) or config
    queued = [_values(known, config.tune.space)]
    for params in best_of(config, other) if other else ():
        if params not in queued:
            queued.append(params)
    return queued


def champion(config: RunConfig) -> RunConfig | None:
    """Return the configuration of the champion's run; None if it is not known here."""
    workspace = Workspace.of(config)
    elsewhere = config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI")
    if not elsewhere and not workspace.tracking_store.is_file():
        # Opening the store would create it, which takes seconds.
        return None
    version = Registry(config, workspace).champion()
    if version is None or RUN not in version.tags:
        return None
    stored = Workspace(workspace.output, version.tags[RUN]).config
    return load(stored) if stored.is_file() else None


def best_of(config: RunConfig, other: str) -> Sequence[Params]:
    """Return the parameters of another study's best trials, best first."""
    records = open_log(logs_address(config), other).read()
    if not records:
        studies = studies_folder(config)
        known = sorted(path.name for path in studies.glob("*") if path.is_dir())
        raise BadInput(
            f"--from {other!r}: there is no such study",
            remedy=f"one of {', '.join(known)}" if known else f"{studies} holds no study",
        )
    _, history = study_of(records)
    best = sorted(
        (trial for trial in history.trials if trial.scores and not trial.too_slow),
        key=lambda trial: (-trial.reached, trial.scores[max(trial.scores)], trial.number),
    )
    return [trial.params for trial in best[:TAKEN_OVER]]


def _values(config: RunConfig, space: Mapping[str, Dimension]) -> Params:
    """Return a configuration's values of the space's fields, as a trial has them.

    It leaves out fields that are not set, and those that do not vary with these values.
    """
    content, values = config.model_dump(mode="json"), dict[str, Any]()
    for field in in_order(space):
        value: Any = content
        for part in field.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None and varies(space, field, values):
            values[field] = value
    return values

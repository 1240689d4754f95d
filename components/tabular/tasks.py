"""The tasks of tables. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from steadytrain.components.shared.config import DataConfig, RunConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tabular.encoder import (
    ClassTableEncoder,
    ClassTableInTime,
    LabelSetTableEncoder,
    LabelSetTableInTime,
    NumberTableEncoder,
    NumberTableInTime,
)
from steadytrain.components.tasks.base import Task, field_names, late
from steadytrain.components.tasks.built_in import (
    label_metrics,
    tested_class_metrics,
    tested_label_metrics,
    tested_number_metrics,
)
from steadytrain.components.tasks.encoding.base import Encoder

_PARTS: Final = "steadytrain.components.tabular.scoring"
_NO_MODULE: Final = "steadytrain.components.tabular.tasks:no_module"
FRAMEWORKS: Final = frozenset(
    {
        "catboost",
        "ensemble",
        "jax",
        "lightgbm",
        "pytorch_tables",
        "sklearn",
        "tensorflow",
        "xgboost",
    }
)
_READS: Final = field_names(
    {
        "model": "framework config",
        "training": "seed max_steps num_train_epochs learning_rate load_best_model_at_end "
        "logging_steps eval_steps save_strategy save_steps save_total_limit save_keep_every "
        "metric_for_best_model greater_is_better early_stopping_patience early_stopping_threshold",
        "data": "task source validation_source test_source splits format csv suffixes exclude "
        "columns target features categories allow_leaks labels parts max_record_bytes "
        "max_bad_share validation_share test_share split_salt",
        "data.columns": "group slice weight time",
    }
)


def _divided_by(
    chance: Callable[[DataConfig], Encoder], time: Callable[[DataConfig], Encoder]
) -> Callable[[DataConfig], Encoder]:
    """Return what opens an encoder, by what divides the records."""
    return lambda data: (time if data.in_time else chance)(data)


def no_module(config: RunConfig, data: DataRecord) -> Any:
    """Raise BadInput: PyTorch trains no table."""
    del data
    raise BadInput(
        f"model.framework = {config.model.framework!r}: it does not train tables",
        remedy=f"use {' or '.join(sorted(FRAMEWORKS))}",
    )


def _class_validation(_: RunConfig) -> Sequence[str]:
    return "loss", "accuracy"


def _number_validation(_: RunConfig) -> Sequence[str]:
    return "loss", "rmse", "mae"


TABULAR_CLASSIFICATION: Final = Task(
    encoder=_divided_by(ClassTableEncoder, ClassTableInTime),
    training=late(_NO_MODULE, metrics=_class_validation),
    scorer=late(f"{_PARTS}:TableClassScorer", metrics=tested_class_metrics),
    packager=late(f"{_PARTS}:TablePackager"),
    tabular=True,
    frameworks=FRAMEWORKS,
    objectives=frozenset({"class_weights"}),
    reads=_READS | {"training.class_weights"},
)
TABULAR_MULTI_LABEL: Final = Task(
    encoder=_divided_by(LabelSetTableEncoder, LabelSetTableInTime),
    training=late(_NO_MODULE, metrics=label_metrics),
    scorer=late(f"{_PARTS}:TableLabelsScorer", metrics=tested_label_metrics),
    packager=late(f"{_PARTS}:TablePackager"),
    tabular=True,
    frameworks=FRAMEWORKS,
    reads=_READS | {"data.label_separator"},
)
TABULAR_REGRESSION: Final = Task(
    encoder=_divided_by(NumberTableEncoder, NumberTableInTime),
    training=late(_NO_MODULE, metrics=_number_validation),
    scorer=late(f"{_PARTS}:TableNumberScorer", metrics=tested_number_metrics),
    packager=late(f"{_PARTS}:TablePackager"),
    regresses=True,
    tabular=True,
    frameworks=FRAMEWORKS,
    reads=_READS,
)

"""The task of time series. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from steadytrain.components.series.encoder import SeriesEncoder
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.tasks.base import Task, field_names, late

_PARTS: Final = "steadytrain.components.series.scoring"
FRAMEWORKS: Final = frozenset({"ensemble", "mlforecast", "pytorch", "statsforecast"})
_READS: Final = field_names(
    {
        "model": "framework config",
        "training": "seed max_steps num_train_epochs learning_rate logging_steps eval_steps "
        "save_strategy save_steps save_total_limit save_keep_every load_best_model_at_end "
        "metric_for_best_model greater_is_better early_stopping_patience early_stopping_threshold",
        "data": "task source format csv suffixes exclude columns target allow_leaks series parts "
        "max_record_bytes max_bad_share",
        "data.columns": "slice",
    }
)


def _validation(_: RunConfig) -> Sequence[str]:
    return "loss", "rmse", "mae"


def _metrics(_: RunConfig) -> Sequence[str]:
    return "loss", "mae", "mase", "mse", "pearson", "pinball", "r2", "rmse", "smape", "spearman"


FORECASTING: Final = Task(
    encoder=SeriesEncoder,
    training=late("steadytrain.components.series.training:Forecasting", metrics=_validation),
    scorer=late(f"{_PARTS}:SeriesScorer", metrics=_metrics),
    packager=late(f"{_PARTS}:SeriesPackager"),
    regresses=True,
    frameworks=FRAMEWORKS,
    reads=_READS,
)

"""The pipeline that trains and scores a configuration on every fold."""

from collections.abc import Mapping
from typing import Any

from kfp import dsl

from steadytrain.components.tune.component import cross_validate as validate_on_folds
from steadytrain.components.tune.component import report
from steadytrain.pipelines.finetune import step
from steadytrain.pipelines.parameters import with_parameters

pipeline = dsl.pipeline(
    name="steadytrain-cross-validate",
    display_name="Cross-validate",
    description="Divide the training side into folds, and train on all folds but one, for each of "
    "them. Each model is scored on the fold that it never saw. Nothing is registered. The study "
    "continues if it has begun. Parameters that you leave empty use the value in the "
    "configuration.",
)


@with_parameters
def cross_validate(parameters: Mapping[str, Any], volume: str) -> None:
    """Run or continue a cross-validation."""
    closing = step(report(**parameters), "Report", volume)
    with dsl.ExitHandler(closing, name="Cross-validate"):
        step(validate_on_folds(**parameters), "Cross-validate", volume)

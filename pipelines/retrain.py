"""The retraining pipeline: it trains only if there is new data, or else ends early with success."""

from collections.abc import Mapping
from typing import Any

from kfp import dsl

from steadytrain.components.detect_change.component import detect_change
from steadytrain.components.report.component import report
from steadytrain.pipelines.finetune import step, train_and_evaluate
from steadytrain.pipelines.parameters import with_parameters

pipeline = dsl.pipeline(
    name="steadytrain-retrain",
    display_name="Retrain when there is new data",
    description="Check whether the data differ from those of the champion and the newest "
    "candidate, and how far they have drifted. If there is new data, train, evaluate and register "
    'a model. If not, end with "nothing new". Parameters that you leave empty use the value in '
    "the configuration.",
)


@with_parameters
def retrain(parameters: Mapping[str, Any], volume: str) -> None:
    """Train, evaluate, and register one model if there is new data."""
    closing = step(report(**parameters), "Report", volume)
    with dsl.ExitHandler(closing, name="Check, and retrain"):
        news = step(detect_change(**parameters), "Look for new data", volume)
        with dsl.If(news.outputs["Output"] == True, name="New data"):  # noqa: E712  KFP's syntax
            train_and_evaluate(parameters, volume)

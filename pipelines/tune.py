"""The tuning pipeline: preprocess, tune, train the winner, evaluate and gate, register, report."""

from collections.abc import Mapping
from typing import Any

from kfp import dsl

from steadytrain.components.preprocess.component import preprocess
from steadytrain.components.tune.component import report, train_winner
from steadytrain.components.tune.component import tune as search
from steadytrain.pipelines.finetune import judge, step
from steadytrain.pipelines.parameters import with_parameters

pipeline = dsl.pipeline(
    name="steadytrain-tune",
    display_name="Tune, train the winner, register",
    description="Search for better settings within a budget, train the best configuration on "
    "fresh seeds, compare the best model with the champion, and register it in MLflow. The study "
    "continues if it has begun. Parameters that you leave empty use the value in the "
    "configuration.",
)


@with_parameters
def tune(parameters: Mapping[str, Any], volume: str) -> None:
    """Run or continue a study, and train, evaluate and register its winner."""
    closing = step(report(**parameters), "Report", volume)
    with dsl.ExitHandler(closing, name="Tune, train the winner, register"):
        prepared = step(preprocess(**parameters), "Preprocess", volume)
        resolved, data = prepared.outputs["resolved"], prepared.outputs["data"]
        tuned = step(search(resolved=resolved, data=data), "Tune", volume)
        with dsl.If(tuned.outputs["Output"] == True, name="Winner"):  # noqa: E712  KFP's syntax
            trained = train_winner(
                resolved=resolved, best=tuned.outputs["best"], summary=tuned.outputs["summary"]
            )
            step(trained, "Train the winner", volume)
            judge(
                trained.outputs["winner"],
                trained.outputs["data"],
                trained.outputs["model"],
                volume,
            )

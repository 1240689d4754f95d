"""The main pipeline: preprocess, train, evaluate and gate, register, promote, then report."""

from collections.abc import Mapping
from typing import Any

from kfp import dsl

from steadytrain.components.evaluate.component import evaluate
from steadytrain.components.preprocess.component import preprocess
from steadytrain.components.register.component import evaluate_and_register, promote, register
from steadytrain.components.report.component import report
from steadytrain.components.train.component import train
from steadytrain.pipelines.parameters import with_parameters
from steadytrain.pipelines.pod_names import current
from steadytrain.pipelines.pods import attach, limit


def step(task: dsl.PipelineTask, title: str, volume: str) -> dsl.PipelineTask:
    """Give a task what every step of ours has: limits, the volume, a title, and no KFP cache."""
    # KFP's cache decides before our code runs, and knows neither the data nor its age. Steps decide
    # about reuse themselves (components/shared/stage.py).
    return attach(limit(task), volume).set_display_name(title).set_caching_options(False)


def train_and_evaluate(parameters: Mapping[str, Any], volume: str) -> None:
    """Add the steps from the data to the champion to the pipeline that is being built."""
    prepared = step(preprocess(**parameters), "Preprocess", volume)
    resolved, data = prepared.outputs["resolved"], prepared.outputs["data"]
    trained = step(train(resolved=resolved, data=data), "Train", volume)
    judge(resolved, data, trained.outputs["model"], volume)


def judge(resolved: Any, data: Any, model: Any, volume: str) -> None:
    """Add the steps from a trained model to the champion to the pipeline that is being built."""
    if current().fuse:
        done = evaluate_and_register(resolved=resolved, data=data, model=model)
        step(done, "Evaluate, gate, register", volume)
        return
    evaluated = step(
        evaluate(resolved=resolved, data=data, model=model), "Evaluate and gate", volume
    )
    registered = step(
        register(resolved=resolved, decision=evaluated.outputs["decision"]), "Register", volume
    )
    with dsl.If(evaluated.outputs["Output"] == True, name="Promoted"):  # noqa: E712  KFP's syntax
        step(promote(resolved=resolved, version=registered.outputs["version"]), "Promote", volume)


pipeline = dsl.pipeline(
    name="steadytrain-finetune",
    display_name="Train, evaluate, register",
    description="Train or fine-tune a model in a run that recovers from failures, compare the "
    "model with the champion, and register it in MLflow. Parameters that you leave empty use the "
    "value in the configuration.",
)


@with_parameters
def finetune(parameters: Mapping[str, Any], volume: str) -> None:
    """Train, evaluate, and register one model."""
    closing = step(report(**parameters), "Report", volume)
    with dsl.ExitHandler(closing, name="Train, evaluate, register"):
        train_and_evaluate(parameters, volume)

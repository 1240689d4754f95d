"""The main DAG: preprocess, train, evaluate and gate, register, promote; then the report."""

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from kfp import dsl

from steadytrain.components.evaluate.component import evaluate
from steadytrain.components.judge.component import judge
from steadytrain.components.preprocess.component import preprocess
from steadytrain.components.register.component import promote, register
from steadytrain.components.report.component import report
from steadytrain.components.shared.attached import MOUNT_PATH, NAME
from steadytrain.components.train.component import train
from steadytrain.pipelines.attachments import attach
from steadytrain.pipelines.resources import limit


def step(task: dsl.PipelineTask, title: str, volume: str) -> dsl.PipelineTask:
    """A task as every one of ours is: with limits, the volume, a title, without KFP's cache."""
    # KFP's cache decides before our code runs and knows neither data nor age;
    # reuse is our own (components/shared/reuse.py).
    return attach(limit(task), volume).set_display_name(title).set_caching_options(False)


_fused: ContextVar[bool] = ContextVar("fused", default=False)


@contextlib.contextmanager
def fused(fuse: bool) -> Iterator[None]:
    """Whether pipelines that are made within have one step for all that follows the training."""
    # KFP calls a pipeline's function with the pipeline's parameters alone.
    token = _fused.set(fuse)
    try:
        yield
    finally:
        _fused.reset(token)


def train_and_judge(parameters: Mapping[str, Any], volume: str) -> None:
    """The steps from the data to the champion, in the context of a pipeline."""
    prepared = step(preprocess(**parameters), "Preprocess", volume)
    resolved, data = prepared.outputs["resolved"], prepared.outputs["data"]
    trained = step(train(resolved=resolved, data=data), "Train", volume)
    if _fused.get():
        judged = judge(resolved=resolved, data=data, model=trained.outputs["model"])
        step(judged, "Evaluate, gate, register", volume)
        return
    judged = step(
        evaluate(resolved=resolved, data=data, model=trained.outputs["model"]),
        "Evaluate and gate",
        volume,
    )
    registered = step(
        register(resolved=resolved, decision=judged.outputs["decision"]), "Register", volume
    )
    with dsl.If(judged.outputs["Output"] == True, name="Promoted"):  # noqa: E712  KFP's syntax
        step(promote(resolved=resolved, version=registered.outputs["version"]), "Promote", volume)


pipeline = dsl.pipeline(
    name="steadytrain-finetune",
    display_name="Train, judge, register",
    description="Trains or fine-tunes a model so that the run finishes, compares it with the "
    "champion, and registers it in MLflow. A field left at its empty value is as the "
    "configuration says.",
)


def finetune(
    config: str = "causal-lm",
    run: str = "",
    output: str = MOUNT_PATH,
    data_source: str = "",
    base_model: str = "",
    global_batch_size: int = 0,
    learning_rate: float = 0.0,
    num_train_epochs: float = 0.0,
    overrides: dict[str, Any] = {},  # noqa: B006  KFP takes the default as a literal
    volume: str = NAME,
) -> None:
    """Trains, judges and registers one model.

    Args:
        config: Name of a preset (causal-lm, chat, sequence-classification), or a whole
            configuration as YAML text.
        run: Identity of the run; the same name continues the same run. Empty: derived from
            the configuration. An asterisk in it becomes the beginning of KFP's own run id: a
            new run each time, for a schedule.
        output: Folder of the volume, for data, checkpoints and reports.
        data_source: Files, folders, globs, s3:// addresses or hub:NAME, separated by commas.
        base_model: Folder, s3:// address, hub:NAME or models:/NAME@ALIAS to start from.
        global_batch_size: Sequences in an optimizer step, over all ranks. 0: as configured.
        learning_rate: Peak learning rate. 0: as configured, or by the rules where that is open.
        num_train_epochs: Passes over the training side. 0: as configured.
        overrides: Any other field, such as {"training.max_steps": 100}.
        volume: The claim of the volume that all steps share, mounted at /mnt/steadytrain.
    """
    parameters = {
        "config": config,
        "run": run,
        "output": output,
        "data_source": data_source,
        "base_model": base_model,
        "global_batch_size": global_batch_size,
        "learning_rate": learning_rate,
        "num_train_epochs": num_train_epochs,
        "overrides": overrides,
        "job": dsl.PIPELINE_JOB_ID_PLACEHOLDER,
    }
    closing = step(report(**parameters), "Report", volume)
    with dsl.ExitHandler(closing, name="Train, judge, register"):
        train_and_judge(parameters, volume)

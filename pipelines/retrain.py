"""The retraining pipeline: it trains only if there is new data, or else ends early with success."""

from typing import Any

from kfp import dsl

from steadytrain.components.detect_change.component import detect_change
from steadytrain.components.report.component import report
from steadytrain.pipelines.attached import MOUNT_PATH, NAME
from steadytrain.pipelines.finetune import step, train_and_evaluate

pipeline = dsl.pipeline(
    name="steadytrain-retrain",
    display_name="Retrain when there is new data",
    description="Check whether the data differ from those of the champion and the newest "
    "candidate, and how far they have drifted. If there is new data, train, evaluate and register "
    'a model. If not, end with "nothing new". Parameters that you leave empty use the value in '
    "the configuration.",
)


def retrain(
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
    """Train, evaluate, and register one model if there is new data.

    Args:
        config: Name of a preset (causal-lm, chat, sequence-classification), or a complete
            configuration as YAML text.
        run: Name of the run. The same name continues the same run. Empty: derived from the
            configuration. An asterisk in it is replaced with the start of KFP's own run id, so that
            each start is a new run, as a schedule needs.
        output: Folder on the volume for data, checkpoints and reports.
        data_source: Files, folders, globs, s3:// addresses or hub:NAME, separated by commas.
        base_model: Folder, s3:// address, hub:NAME or models:/NAME@ALIAS to start from.
        global_batch_size: Sequences per optimizer step, over all ranks. 0: as configured.
        learning_rate: Peak learning rate. 0: as configured, or by the rules if the configuration
            leaves it open.
        num_train_epochs: Passes over the training data. 0: as configured.
        overrides: Any other field, such as {"training.max_steps": 100}.
        volume: Claim of the volume that all steps share, mounted at /mnt/steadytrain.
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
    with dsl.ExitHandler(closing, name="Check, and retrain"):
        news = step(detect_change(**parameters), "Look for new data", volume)
        with dsl.If(news.outputs["Output"] == True, name="New data"):  # noqa: E712  KFP's syntax
            train_and_evaluate(parameters, volume)

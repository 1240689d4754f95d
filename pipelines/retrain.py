"""Retraining: is there anything new? Only then the main DAG; else the run ends early, and well."""

from typing import Any

from kfp import dsl

from steadytrain.components.look.component import look
from steadytrain.components.report.component import report
from steadytrain.components.shared.attached import MOUNT_PATH, NAME
from steadytrain.pipelines.finetune import step, train_and_judge

pipeline = dsl.pipeline(
    name="steadytrain-retrain",
    display_name="Retrain when there are new data",
    description="Looks whether the data are other ones than those of the champion and of the "
    "newest candidate, and how far they have drifted. If there is something new, it trains, judges "
    'and registers a model; if not, it ends with "nothing new". A field left at its empty value '
    "is as the configuration says.",
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
    """Trains, judges and registers one model, where there are new data.

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
    with dsl.ExitHandler(closing, name="Look, and retrain"):
        news = step(look(**parameters), "Look for new data", volume)
        with dsl.If(news.outputs["Output"] == True, name="New data"):  # noqa: E712  KFP's syntax
            train_and_judge(parameters, volume)

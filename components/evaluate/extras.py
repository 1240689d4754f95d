"""What the evaluate step measures besides scores on the test side, if it is configured."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from steadytrain.components.evaluate.comparison import resampling
from steadytrain.components.evaluate.language_tasks import TaskResults, run_lm_tasks
from steadytrain.components.evaluate.robustness import measure_robustness
from steadytrain.components.evaluate.scoring import Report, place
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.events.types import Warned
from steadytrain.components.shared.lm_tasks import LmTasks
from steadytrain.components.shared.out_of_memory import ran_out
from steadytrain.components.shared.records import Interval, LandscapeRecord
from steadytrain.components.shared.stage import Stage
from steadytrain.components.tasks.registry import OpenTask


def scoring_progress(current: Stage, who: str, records: pa.Table) -> Report:
    """Return a function that reports in the run's events how many records are scored."""
    total = records.num_rows
    return lambda done: current.progress(f"scoring the {who}", done, total, "records")


def task_results(
    current: Stage, config: RunConfig, task: OpenTask, folder: Path, tasks: LmTasks
) -> TaskResults:
    """Run lm-eval's tasks on the candidate."""
    results = run_lm_tasks(
        place(task.packager.load_exported(folder), config),
        tasks,
        batch_size=config.evaluation.batch_size,
        how=resampling(config),
        progress=lambda what, done, total: current.progress(
            f"{what} of lm-eval's tasks", done, total, "requests"
        ),
    )
    for remark in results.remarks:
        current.emit(Warned(stage=current.name, message=remark))
    return results


def robustness_of(
    current: Stage, config: RunConfig, task: OpenTask, folder: Path, records: pa.Table
) -> dict[str, dict[str, Interval]]:
    """Measure robustness as far as it is configured."""
    if not config.evaluation.robustness:
        return {}
    report = scoring_progress(current, "perturbed candidate", records)
    return measure_robustness(config, task, folder, records, report)


def landscape_of(
    current: Stage, config: RunConfig, task: OpenTask, folder: Path, records: pa.Table
) -> tuple[LandscapeRecord | None, str]:
    """Measure the loss around the trained weights if it is configured.

    It is no result, so that the evaluation does without it if memory runs out.

    Returns:
        The landscape, and why there is none although it is configured.
    """
    settings = config.evaluation.landscape
    if not settings.on:
        return None, ""
    # Here, because importing it imports torch.
    from steadytrain.components.evaluate.landscape import measure_landscape

    total = settings.scorings
    try:
        found = measure_landscape(
            config,
            task,
            folder,
            records,
            lambda done: current.progress("measuring the loss landscape", done, total, "points"),
        )
    except Exception as error:
        if not ran_out(error):
            raise
        said = redact(str(error).partition("\n")[0])
    else:
        return found, ""
    missing = (
        f"evaluation.landscape was not measured, because memory ran out ({said}): start the "
        "evaluate step again on a device with more memory, or leave evaluation.landscape out"
    )
    current.emit(Warned(stage=current.name, message=missing))
    return None, missing

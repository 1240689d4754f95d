"""What the evaluate step measures besides scores on the test side, if it is configured."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from steadytrain.components.evaluate.comparison import resampling
from steadytrain.components.evaluate.language_tasks import TaskResults, run_lm_tasks
from steadytrain.components.evaluate.metric import Scores, measure
from steadytrain.components.evaluate.scoring import Report, Scoring, score, to_compute_device
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.events.types import Warned
from steadytrain.components.shared.foreign import ran_out
from steadytrain.components.shared.lm_tasks import LmTasks
from steadytrain.components.shared.records import Interval, LandscapeRecord
from steadytrain.components.shared.stage import Stage
from steadytrain.components.tasks.base import OpenTask
from steadytrain.components.tasks.encoding.labeled_text import PAIR
from steadytrain.components.techniques.text_augmentation.changes import generator_of, with_typos


def measure_robustness(
    config: RunConfig, task: OpenTask, folder: Path, records: pa.Table, report: Report
) -> dict[str, dict[str, Interval]]:
    """Return the metrics by the field of `evaluation` that asks for them.

    With several data sets, each also as PART/metric, over the records of that part.

    Args:
        folder: of the exported model.
        report: called with the number of records scored so far, from 0 for each field.

    Raises:
        OutOfMemory: one record alone does not fit in memory.
    """
    evaluation, result = config.evaluation, {}
    components = to_compute_device(task.packager.load_exported(folder), config)
    for field in evaluation.robustness:
        scoring: Scoring = task.scorer.score
        given = records
        if field == "attack":
            scoring = partial(task.scorer.score_attacked, attack=evaluation.attack)
        else:
            given = noised(records, evaluation.character_noise, config.training.seed)
        how = f"the candidate with evaluation.{field}"
        scores = Scores.of(score(how, scoring, components, given, report))
        result[field] = measure(scores, resampling(config)) | _by_part(scores, config)
    return result


def _by_part(scores: Scores, config: RunConfig) -> dict[str, Interval]:
    if scores.classes is None or scores.classes.part is None:
        return {}
    return {
        f"{part}/{name}": interval
        for part, rows in scores.by_slice().items()
        for name, interval in measure(scores.only(rows), resampling(config)).items()
    }


def noised(records: pa.Table, share: float, seed: int) -> pa.Table:
    """Return the records with typing errors in their texts, which depend on the seed and the id.

    Args:
        records: `id`, `text`, and with pairs of texts `text_pair`.
        share: of the characters that get an error.
    """
    random = [generator_of(seed, str(name)) for name in records.column("id").to_pylist()]
    for column in ("text", PAIR):
        if column not in records.column_names:
            continue
        given = zip(records.column(column).to_pylist(), random, strict=True)
        texts = [with_typos(str(text), share, generator) for text, generator in given]
        number = records.column_names.index(column)
        field: Any = records.schema.field(number)
        records = records.set_column(number, field, pa.array(texts, field.type))
    return records


def scoring_progress(current: Stage, who: str, records: pa.Table) -> Report:
    """Return a function that reports in the run's events how many records are scored."""
    total = records.num_rows
    return lambda done: current.progress(f"scoring the {who}", done, total, "records")


def task_results(
    current: Stage, config: RunConfig, task: OpenTask, folder: Path, tasks: LmTasks
) -> TaskResults:
    """Run lm-eval's tasks on the candidate."""
    results = run_lm_tasks(
        to_compute_device(task.packager.load_exported(folder), config),
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
        landscape = measure_landscape(
            config,
            task,
            folder,
            records,
            lambda done: current.progress("measuring the loss landscape", done, total, "points"),
        )
    except Exception as error:
        if not ran_out(error):
            raise
        reason = redact(str(error).partition("\n")[0])
    else:
        return landscape, ""
    missing = (
        f"evaluation.landscape was not measured, because memory ran out ({reason}): start the "
        "evaluate step again on a device with more memory, or leave evaluation.landscape out"
    )
    current.emit(Warned(stage=current.name, message=missing))
    return None, missing

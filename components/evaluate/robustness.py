"""The metrics of a classifier on perturbed test records: under attack, and with typing errors."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from steadytrain.components.evaluate.comparison import resampling
from steadytrain.components.evaluate.measure import measure
from steadytrain.components.evaluate.scores import Scores
from steadytrain.components.evaluate.scoring import Report, Scoring, place, score
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.records import Interval
from steadytrain.components.tasks.augmentation import generator_of, with_typos
from steadytrain.components.tasks.encoding.labeled_text import PAIR
from steadytrain.components.tasks.registry import OpenTask


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
    evaluation, found = config.evaluation, {}
    components = place(task.packager.load_exported(folder), config)
    for field in evaluation.robustness:
        scoring: Scoring = task.scorer.score
        given = records
        if field == "attack":
            scoring = partial(task.scorer.score_attacked, attack=evaluation.attack)
        else:
            given = noised(records, evaluation.character_noise, config.training.seed)
        how = f"the candidate with evaluation.{field}"
        scores = Scores.of(score(how, scoring, components, given, report))
        found[field] = measure(scores, resampling(config)) | _by_part(scores, config)
    return found


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

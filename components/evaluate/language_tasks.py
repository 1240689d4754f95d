"""Run lm-eval's tasks on a model, and return each metric with its standard error."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from steadytrain.components.evaluate.bootstrap import FloatArray, Resampling, replicate
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.lm_tasks import LmTasks, averaged, running, score_name
from steadytrain.components.shared.records import TaskScore

_OF_MEAN_NATS: Final = {
    "bits_per_byte": lambda nats: -nats / math.log(2),
    "byte_perplexity": lambda nats: np.exp(-nats),
    "word_perplexity": lambda nats: np.exp(-nats),
}
"""Metrics of (log-likelihood, size) pairs, for which lm-eval has no standard error."""

_COLUMNS: Final[dict[str, Any]] = {
    "metric": pa.string(),
    "document": pa.int64(),
    "value": pa.float64(),
    "weight": pa.float64(),
}
ANSWERS: Final = pa.schema(_COLUMNS)
"""The result of each document. A metric is the sum of the values over the sum of the weights."""


@dataclass(frozen=True)
class TaskResults:
    """Results of lm-eval's tasks.

    scores: by TASK/METRIC.
    answers: rows of `ANSWERS`.
    remarks: as in `Harness`.
    """

    scores: dict[str, TaskScore]
    answers: pa.Table
    remarks: list[str]


def run_lm_tasks(
    components: Mapping[str, Any],
    tasks: LmTasks,
    *,
    batch_size: int,
    how: Resampling,
    progress: Any,
) -> TaskResults:
    """Run the tasks.

    Args:
        components: "model" and "tokenizer".
        batch_size: sequences per batch, when generating text or reading padded batches.
        how: bootstrap settings for standard errors that have no formula.
        progress: as in `Harness`.

    Raises:
        BadInput: the model is not a causal language model with a tokenizer, or a task cannot run on
            it.
    """
    import torch
    from lm_eval.defaults import DEFAULT_OTHER_SEED
    from lm_eval.evaluator import evaluate

    from steadytrain.components.evaluate.harness import Harness

    if "tokenizer" not in components or not hasattr(components["model"], "generate"):
        raise BadInput(
            "evaluation.tasks: data.task does not train a causal language model with a tokenizer",
            remedy="leave evaluation.tasks out",
        )
    model = Harness(
        components["model"], components["tokenizer"], batch_size=batch_size, progress=progress
    )
    # For tasks that sample. lm-eval's own command sets the same seed.
    torch.manual_seed(DEFAULT_OTHER_SEED)
    with running(", ".join(tasks.loaded["tasks"])):
        evaluation = evaluate(
            lm=model, task_dict=dict(tasks.loaded), bootstrap_iters=how.samples, log_samples=True
        )
    known = list(_documents(evaluation["samples"]))
    errors = {
        name: _standard_error(metric, values, how)
        for name, _, metric, values in known
        if metric in _OF_MEAN_NATS
    }
    answers = [
        _answers(name, metric, values)
        for name, task, metric, values in known
        if averaged(tasks.loaded["tasks"][task], metric)
    ]
    scores = dict(_scores(evaluation, errors))
    return TaskResults(scores, pa.concat_tables([ANSWERS.empty_table(), *answers]), model.remarks)


def _scores(
    found: Mapping[str, Any], errors: Mapping[str, float]
) -> Iterator[tuple[str, TaskScore]]:
    for task, values in found["results"].items():
        for key, value in values.items():
            metric, separator, filtered = key.partition(",")
            if not separator or metric.endswith("_stderr") or not _is_number(value):
                continue
            name = score_name(task, metric, filtered)
            error = values.get(f"{metric}_stderr,{filtered}")
            yield (
                name,
                TaskScore(
                    value=float(value),
                    stderr=float(error) if _is_number(error) else errors.get(name),
                    greater_is_better=found["higher_is_better"].get(task, {}).get(metric),
                    examples=int(values["sample_len"]),
                ),
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and math.isfinite(value)


def _documents(samples: Mapping[str, Sequence[Any]]) -> Iterator[tuple[str, str, str, list[Any]]]:
    """Yield name, task, metric, and the metric's value for each document."""
    for task, documents in samples.items():
        filters = dict.fromkeys(document["filter"] for document in documents)
        for filtered in filters:
            filtered_documents = [
                document for document in documents if document["filter"] == filtered
            ]
            for metric in filtered_documents[0]["metrics"]:
                values = [document[metric] for document in filtered_documents if metric in document]
                yield score_name(task, metric, filtered), task, metric, values


def _standard_error(metric: str, pairs: Sequence[tuple[float, float]], how: Resampling) -> float:
    nats, sizes = np.asarray(pairs, dtype=np.float64).T

    def statistic(weights: FloatArray) -> dict[str, FloatArray]:
        return {metric: _OF_MEAN_NATS[metric](weights @ nats / (weights @ sizes))}

    replicates = replicate(statistic, np.arange(len(nats)), how)[metric]
    return float(np.std(replicates, ddof=1))


def _answers(name: str, metric: str, values: Sequence[Any]) -> pa.Table:
    if metric == "bits_per_byte":
        nats, weights = np.asarray(values, dtype=np.float64).T
        numbers = -nats / math.log(2)
    else:
        numbers = np.asarray(values, dtype=np.float64)
        weights = np.ones(len(numbers))
    columns = [[name] * len(numbers), np.arange(len(numbers)), numbers, weights]
    return pa.table(columns, schema=ANSWERS)

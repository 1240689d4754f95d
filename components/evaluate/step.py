"""The evaluate step: score the candidate on the test side, then run the gate, in one process.

Both need the model and the records, so the gate is not a separate step. If nothing changed, the
step reuses an earlier evaluation. It runs the gate again even then, because the champion may have
changed. The one exception: if the run's own model is champion already, the decision that promoted
it stays valid.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from steadytrain.components.evaluate.classes import (
    Classes,
    average_precisions,
    calibration_bins,
    confusion,
    per_class,
    per_label,
    precision_recall,
)
from steadytrain.components.evaluate.comparison import Candidate, resampling
from steadytrain.components.evaluate.extras import (
    landscape_of,
    robustness_of,
    scoring_progress,
    task_results,
)
from steadytrain.components.evaluate.metric import Scores, measure, measure_slices, point_values
from steadytrain.components.evaluate.paired import read_scores, store_table
from steadytrain.components.evaluate.scoring import judged_records, score_candidate, trained_model
from steadytrain.components.pages.evaluation_section import evaluation_section
from steadytrain.components.pages.html import html
from steadytrain.components.shared import plugins
from steadytrain.components.shared.config import RunConfig, load
from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.digest import JUDGING_CODE
from steadytrain.components.shared.effects import Use
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.events.types import BatchSplit, Warned
from steadytrain.components.shared.lm_tasks import LmTasks, open_lm_tasks
from steadytrain.components.shared.quantities import number
from steadytrain.components.shared.records import (
    DataRecord,
    EvaluationRecord,
    GateRecord,
    TrainRecord,
)
from steadytrain.components.shared.registry import Registry, Version, decided_about
from steadytrain.components.shared.stage import ReuseStore, Stage, stage, step_key
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.tasks.base import OpenTask, task_code
from steadytrain.components.tasks.encoding.labeled_text import PAIR
from steadytrain.components.tasks.fitting import splitting

if TYPE_CHECKING:
    from kfp import dsl

_WORST: Final = 10
_EXCERPT: Final = 240
_ANSWERS: Final = {
    "target": "True",
    "label": "True",
    "labels": "True",
    "predicted": "Predicted",
    "prediction": "Predicted",
    "predictions": "Predicted",
}
_TEXTS: Final = ("text", PAIR, "completion")
"""Columns of test records with what the excerpts show."""


def evaluation_page(
    evaluation: EvaluationRecord, scores: pa.Table, records: pa.Table, *, title: str
) -> str:
    """Return the page as HTML.

    Args:
        scores: columns of `Scorer.score`, one row per record.
        records: the raw records in the same order. The page shows excerpts of their columns in
            _TEXTS.
    """
    return html(
        "evaluation",
        kind="evaluation",
        name=title,
        task=evaluation.task,
        evaluation=evaluation_section(evaluation, classes=len(evaluation.labels)),
        worst=_worst(scores, records, evaluation.labels),
    )


def _worst(scores: pa.Table, records: pa.Table, labels: Sequence[str]) -> dict[str, Any]:
    loss = np.asarray(scores.column("loss").to_numpy())
    targets = np.asarray(scores.column("targets").to_numpy())
    mean = loss / np.maximum(targets, 1)
    chosen = np.argsort(-mean, kind="stable")[:_WORST]
    columns = [name for name in _TEXTS if name in records.column_names]
    texts = records.select(columns).take(chosen).to_pylist()
    known = [name for name in _ANSWERS if name in scores.column_names]
    rows = []
    for index, row in enumerate(map(int, chosen)):
        given = [texts[index][name] for name in columns if texts[index][name]]
        identity = str(scores.column("id")[row])[:12]
        slice_name = scores.column("slice")[row].as_py() or ""
        result = [_answer(scores.column(name)[row].as_py(), labels) for name in known]
        # Secrets are replaced before a text is cut, because a part of one is not recognized.
        shown = "\n".join(text[: _EXCERPT // len(given)] for text in map(redact, given))
        rows.append((identity, [slice_name, number(float(mean[row])), *result, shown]))
    answers = [_ANSWERS[name] for name in known]
    return {"columns": ["Slice", "Loss a target", *answers, "Beginning of the text"], "rows": rows}


def _answer(value: Any, labels: Sequence[str]) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return number(value)
    indices = value if isinstance(value, list) else [value]
    return ", ".join(labels[index] if labels else str(index) for index in indices) or "no label"


SCORES = "scores.parquet"
BASELINE_SCORES = "baseline.parquet"
TASK_ANSWERS = "tasks.parquet"
PAGE = "evaluation.html"

_SAYS_NOTHING: Final = frozenset({"ece"})
"""Metrics of the naive baseline that tell nothing: class frequencies are always calibrated."""


def run(
    config: RunConfig, data: DataRecord | None = None, train: TrainRecord | None = None
) -> tuple[EvaluationRecord, GateRecord]:
    """Evaluate the run's model and decide whether it becomes champion.

    Write the records "evaluate" and "gate", the per-example scores (Parquet) and an HTML page of
    the evaluation.

    Raises:
        BadInput: the steps before this one have not run.
        ChampionAway: the champion cannot be loaded or scored now.
        DataError: the test side has no usable records.
        TrackingError: the registry cannot be used.
    """
    with stage(config, "evaluate") as current, reporting_splits(current):
        workspace = current.workspace
        data = data or DataRecord.load(workspace.record("preprocess"))
        train = train or TrainRecord.load(workspace.record("train"))
        task = OpenTask(config, data)
        records = judged_records(config, data)
        tasks = open_lm_tasks(config) if config.evaluation.tasks else None
        evaluation, table = _evaluation(current, config, data, train, task, records, tasks)
        evaluation.save(workspace.record("evaluate"))
        page = evaluation_page(evaluation, table, records, title=config.run_id)
        LocalStorage(workspace.evaluation).write(PAGE, page.encode())

        candidate = Candidate(
            config,
            data,
            task,
            train.weights_digest,
            evaluation,
            records,
            Scores.of(table),
            _baseline(evaluation),
            tasks,
        )
        registry = Registry(config, workspace)
        champion = registry.champion()
        decision = _standing(candidate, champion, current) or decide(
            candidate, champion, registry, current
        )
        decision.save(workspace.record("gate"))
        current.summary = _summary(evaluation, decision)
        return evaluation, decision


def decide(
    candidate: Candidate, champion: Version | None, registry: Registry, current: Stage
) -> GateRecord:
    """Run the gate, and return its decision.

    Raises:
        ChampionAway: the champion cannot be loaded or scored now.
        TrackingError: the registry cannot be used.
    """
    return candidate.against(
        champion,
        scoring_progress(current, "champion", candidate.records),
        earlier=registry.judged_on(candidate.test_digest, besides=candidate.weights_digest),
    )


def _standing(candidate: Candidate, champion: Version | None, current: Stage) -> GateRecord | None:
    """Return the decision that made this run's model champion, if the model is still champion.

    Otherwise, a run that starts again would compare its model with itself. That still happens if
    the decision cannot be read, and then the champion stays.
    """
    record_path = current.workspace.record("gate")
    if champion is None or not candidate.registered_as(champion) or not record_path.exists():
        return None
    try:
        earlier = GateRecord.load(record_path)
    except BadInput as error:
        message = f"{error.message.splitlines()[0]}: decided again, and the champion stays"
        current.emit(Warned(stage=current.name, message=message))
        return None
    about = decided_about(candidate.config, candidate.weights_digest)
    return earlier if earlier.promoted and earlier.subject == about else None


def reporting_splits(current: Stage) -> AbstractContextManager[None]:
    """Return a context that reports in the run's events where memory ran out for a batch."""

    def notify(work: str, rows: int, instead_of: int) -> None:
        stage = current.name
        current.emit(BatchSplit(stage=stage, work=work, rows=rows, instead_of=instead_of))

    return splitting("evaluating", notify)


def load_candidate(config: RunConfig, workspace: Workspace) -> Candidate:
    """Load the candidate as the evaluate step saved it, to run the gate again.

    Raises:
        BadInput: the evaluation is of a different model than the one in the train record, or its
            scores are missing or damaged.
    """
    data = DataRecord.load(workspace.record("preprocess"))
    train = TrainRecord.load(workspace.record("train"))
    evaluation = EvaluationRecord.load(workspace.record("evaluate"))
    if evaluation.weights_digest != train.weights_digest:
        raise BadInput(
            f"{workspace.record('evaluate')} evaluates a different model than the one in "
            f"{workspace.record('train')}",
            remedy="run the evaluate and register steps again",
        )
    return Candidate(
        config,
        data,
        OpenTask(config, data),
        train.weights_digest,
        evaluation,
        judged_records(config, data),
        read_scores(Path(evaluation.scores)),
        _baseline(evaluation),
        open_lm_tasks(config) if config.gate.task_metric else None,
    )


def _baseline(evaluation: EvaluationRecord) -> Scores | None:
    scores_path = evaluation.baseline_scores
    return read_scores(Path(scores_path)) if scores_path else None


def _evaluation(
    current: Stage,
    config: RunConfig,
    data: DataRecord,
    train: TrainRecord,
    task: OpenTask,
    records: pa.Table,
    tasks: LmTasks | None,
) -> tuple[EvaluationRecord, pa.Table]:
    """Return the evaluation and the per-example scores. If nothing changed, reuse earlier ones."""
    store = ReuseStore(current.workspace, "evaluate", EvaluationRecord)
    key = step_key(
        data.fingerprint,
        train.weights_digest,
        config.counted(Use.SCORES),
        task_code(config.data.task),
        plugins.added(plugins.METRICS),
        *([tasks.digest] if tasks else []),
        code=JUDGING_CODE,
    )
    known = store.find(key, ttl_seconds=config.recovery.reuse_ttl_seconds)
    if known is not None:
        current.reuse(store.origin(key))
        return known, pq.read_table(known.scores)
    report = scoring_progress(current, "candidate", records)
    table, splits = score_candidate(config, task, trained_model(train), records, report)
    folder = current.workspace.evaluation
    path = store_table(folder / SCORES, table)
    files, baselines, reached = [path], {}, {}
    naive = task.scorer.score_baseline(records)
    if naive is not None:
        files.append(store_table(folder / BASELINE_SCORES, naive))
        metrics = point_values(Scores.of(naive))
        baselines = {name: metrics[name] for name in metrics.keys() - _SAYS_NOTHING}
    if tasks is not None:
        results = task_results(current, config, task, trained_model(train), tasks)
        files.append(store_table(folder / TASK_ANSWERS, results.answers))
        reached = results.scores
    scores = Scores.of(table)
    classes, sets = scores.classes, scores.sets
    either, labels = classes or sets, _labels(data, classes)
    averages = average_precisions(either, labels) if either else {}
    given = (current, config, task, trained_model(train), records)
    robustness = robustness_of(*given)
    landscape, missing = landscape_of(*given)
    evaluation = EvaluationRecord(
        task=config.data.task,
        weights_digest=train.weights_digest,
        examples=records.num_rows,
        metrics=measure(scores, resampling(config)),
        baselines=baselines,
        baseline_scores=str(files[1]) if baselines else "",
        slices=measure_slices(scores),
        labels=labels,
        confusion=confusion(classes, len(labels)) if classes else [],
        per_class=per_class(classes, labels, averages)
        if classes
        else per_label(sets, labels, averages)
        if sets
        else {},
        calibration=calibration_bins(classes) if classes else [],
        curves=precision_recall(either, labels, averages) if either else {},
        scores=str(path),
        splits=splits,
        tasks=reached,
        answers=str(folder / TASK_ANSWERS) if tasks else "",
        robustness=robustness,
        landscape=landscape,
        landscape_missing=missing,
    )
    if not missing:
        store.remember(key, evaluation, files)
    return evaluation, table


def _labels(data: DataRecord, classes: Classes | None) -> list[str]:
    """Return the names of the classes, or their numbers if a user-defined task has no names."""
    if classes is None or data.labels:
        return data.labels
    return [str(index) for index in range(classes.probabilities.shape[1])]


def _summary(evaluation: EvaluationRecord, decision: GateRecord) -> str:
    """Return the gate's reason, after the comparison with a trivial baseline if one is known."""
    known = [name for name in evaluation.baselines if name in evaluation.metrics]
    if not known:
        return decision.reason
    name = decision.metric if decision.metric in known else known[0]
    return (
        f"{name} {evaluation.metrics[name].value:.4g}, of the baseline "
        f"{evaluation.baselines[name]:.4g}; {decision.reason}"
    )


def kfp_evaluate(
    *,
    resolved: dsl.Artifact,
    data: dsl.Dataset,
    model: dsl.Model,
    evaluation: dsl.Artifact,
    decision: dsl.Artifact,
    metrics: dsl.Metrics,
    classes: dsl.ClassificationMetrics,
    page: dsl.HTML,
) -> bool:
    """Run the step.

    Returns:
        Whether the gate lets the candidate become champion.
    """
    config = load(Path(resolved.path))
    workspace = Workspace.of(config)
    judged, gate = run(config, DataRecord.load(Path(data.path)), TrainRecord.load(Path(model.path)))
    shutil.copyfile(workspace.record("evaluate"), evaluation.path)
    shutil.copyfile(workspace.record("gate"), decision.path)
    shutil.copyfile(workspace.evaluation / "evaluation.html", page.path)
    decision.metadata.update(promoted=gate.promoted, reason=gate.reason)
    for name, interval in judged.metrics.items():
        metrics.log_metric(name, interval.value)
    for name, value in judged.baselines.items():
        metrics.log_metric(f"baseline_{name}", value)
    for name, reached in judged.tasks.items():
        metrics.log_metric(name, reached.value)
    if judged.confusion:
        classes.log_confusion_matrix(judged.labels, judged.confusion)
    return gate.promoted

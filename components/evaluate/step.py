"""The evaluate step: the candidate on the test side, then the gate, in one process.

Both need the model and the records, so the gate is no step of its own. An
evaluation is used again where nothing has changed; the gate is always decided
anew, since there may be another champion.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from steadytrain.components.evaluate.comparison import Candidate, resampling
from steadytrain.components.evaluate.metrics import (
    Classes,
    Scores,
    confusion,
    measure,
    measure_slices,
    per_class,
)
from steadytrain.components.evaluate.page import evaluation_page
from steadytrain.components.evaluate.scoring import (
    Report,
    judged_records,
    score_candidate,
    trained_model,
)
from steadytrain.components.register.verdict import decided_about
from steadytrain.components.register.versions import Registry, Version
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.digest import JUDGING_CODE, users_code_digest
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.events.types import Warned
from steadytrain.components.shared.records import (
    DataRecord,
    EvaluationRecord,
    GateRecord,
    TrainRecord,
)
from steadytrain.components.shared.reuse import ReuseStore, step_key
from steadytrain.components.shared.stage import Stage, stage
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.tasks.registry import open_task

SCORES = "scores.parquet"
PAGE = "evaluation.html"


def run(
    config: RunConfig, data: DataRecord | None = None, train: TrainRecord | None = None
) -> tuple[EvaluationRecord, GateRecord]:
    """Evaluates the run's model and decides whether it becomes champion.

    Leaves the records "evaluate" and "gate", the per-example scores (Parquet)
    and a page of the evaluation.

    Raises:
        BadInput: the steps before this one have not run.
        DataError: the test side has nothing to judge by.
        TrackingError: the registry cannot be used.
    """
    with stage(config, "evaluate") as current:
        workspace = current.workspace
        data = data or DataRecord.load(workspace.record("preprocess"))
        train = train or TrainRecord.load(workspace.record("train"))
        task = open_task(config, data)
        records = judged_records(config, data)
        evaluation, table = _evaluation(current, config, data, train, task, records)
        evaluation.save(workspace.record("evaluate"))
        page = evaluation_page(evaluation, table, records, title=config.run_id)
        LocalStorage(workspace.evaluation).write(PAGE, page.encode())

        candidate = Candidate(
            config, data, task, train.weights_digest, evaluation, records, Scores.of(table)
        )
        champion = Registry(config, workspace).champion()
        decision = _standing(candidate, champion, current) or candidate.against(
            champion, scoring_progress(current, "champion", records)
        )
        decision.save(workspace.record("gate"))
        current.summary = _summary(evaluation, decision)
        return evaluation, decision


def _standing(candidate: Candidate, champion: Version | None, current: Stage) -> GateRecord | None:
    """The decision that made this run's model champion, where it is champion still.

    A run that is started again would be judged against itself otherwise; where the decision
    cannot be read it is, and the champion stays.
    """
    place = current.workspace.record("gate")
    if champion is None or not candidate.registered_as(champion) or not place.exists():
        return None
    try:
        earlier = GateRecord.load(place)
    except BadInput as error:
        message = f"{error.message.splitlines()[0]}: decided anew, the champion stays"
        current.emit(Warned(stage=current.name, message=message))
        return None
    about = decided_about(candidate.config, candidate.weights_digest)
    return earlier if earlier.promoted and earlier.subject == about else None


def scoring_progress(current: Stage, who: str, records: pa.Table) -> Report:
    """Tells the run's events how far the scoring of a model is."""
    total = records.num_rows
    return lambda done: current.progress(f"scoring the {who}", done, total, "records")


def load_candidate(config: RunConfig, workspace: Workspace) -> Candidate:
    """The candidate as the evaluate step left it, to decide again."""
    data = DataRecord.load(workspace.record("preprocess"))
    train = TrainRecord.load(workspace.record("train"))
    evaluation = EvaluationRecord.load(workspace.record("evaluate"))
    if evaluation.weights_digest != train.weights_digest:
        raise BadInput(
            f"{workspace.record('evaluate')} is the evaluation of another model than the one of "
            f"{workspace.record('train')}",
            remedy="run the steps evaluate and register again",
        )
    return Candidate(
        config,
        data,
        open_task(config, data),
        train.weights_digest,
        evaluation,
        judged_records(config, data),
        Scores.of(pq.read_table(evaluation.scores)),
    )


def _evaluation(
    current: Stage,
    config: RunConfig,
    data: DataRecord,
    train: TrainRecord,
    task: Any,
    records: pa.Table,
) -> tuple[EvaluationRecord, pa.Table]:
    """The evaluation and the per-example scores, from an earlier one where nothing changed."""
    store = ReuseStore(current.workspace, "evaluate", EvaluationRecord)
    key = step_key(
        data.fingerprint,
        train.weights_digest,
        config.data.model_dump(mode="json"),
        config.evaluation.model_dump(mode="json"),
        config.training.seed,
        users_code_digest(config.data.task),
        rooms=JUDGING_CODE,
    )
    known = store.find(key, ttl_seconds=config.recovery.reuse_ttl_seconds)
    if known is not None:
        current.reused = True
        return known, pq.read_table(known.scores)
    report = scoring_progress(current, "candidate", records)
    table, splits = score_candidate(config, task, trained_model(train), records, report)
    path = current.workspace.evaluation / SCORES
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    LocalStorage(path.parent).write(path.name, sink.getvalue().to_pybytes())
    scores = Scores.of(table)
    classes = scores.classes
    labels = _labels(data, classes)
    evaluation = EvaluationRecord(
        task=config.data.task,
        weights_digest=train.weights_digest,
        examples=records.num_rows,
        metrics=measure(scores, resampling(config)),
        baselines=task.baselines(records),
        slices=measure_slices(scores),
        labels=labels,
        confusion=confusion(classes, len(labels)) if classes else [],
        per_class=per_class(classes, labels) if classes else {},
        scores=str(path),
        splits=splits,
    )
    store.remember(key, evaluation, [path])
    return evaluation, table


def _labels(data: DataRecord, classes: Classes | None) -> list[str]:
    """Names of the classes; their numbers, where a task of one's own has no names for them."""
    if classes is None or data.labels:
        return data.labels
    return [str(index) for index in range(classes.probabilities.shape[1])]


def _summary(evaluation: EvaluationRecord, decision: GateRecord) -> str:
    """The sentence of the gate, after what a trivial model reaches, where that is known."""
    known = [name for name in evaluation.baselines if name in evaluation.metrics]
    if not known:
        return decision.reason
    name = known[0]
    return (
        f"{name} {evaluation.metrics[name].value:.4g}, of the baseline "
        f"{evaluation.baselines[name]:.4g}; {decision.reason}"
    )

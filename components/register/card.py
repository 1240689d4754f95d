"""The model card of a registered version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.quantities import duration
from steadytrain.components.shared.records import (
    DataRecord,
    EvaluationRecord,
    GateRecord,
    TrainRecord,
)


def model_card(
    config: RunConfig,
    data: DataRecord,
    train: TrainRecord,
    evaluation: EvaluationRecord,
    gate: GateRecord,
    tags: Mapping[str, str],
) -> str:
    """Return the model card in Markdown: the gate's reason, scores, training data and origin."""
    attempts = f"{train.attempts} attempt{'s' if train.attempts > 1 else ''}"
    test = f"## Evaluation on {evaluation.examples:,} examples of the test side"
    return "\n\n".join(
        [
            f"# {config.model_name}",
            f"Task `{config.data.task}`, {train.parameters:,} parameters, from "
            f"{config.model.base or 'scratch'}. Trained by steadytrain for {train.steps:,} steps "
            f"({duration(train.seconds)}, {attempts}); "
            f"the best {train.metric} of the validation side was {train.best_score:.4g}, at step "
            f"{train.best_step:,}.",
            "## Gate",
            f"{gate.reason[0].upper()}{gate.reason[1:]}.",
            *_search(gate),
            test,
            _table(["metric", "value", "interval", "baseline"], _metric_rows(evaluation)),
            *_tasks(evaluation),
            "## Data",
            ", ".join(f"`{address}`" for _, address in config.data.addresses),
            _table(
                ["side", "documents", "rows", "tokens"],
                (
                    [name, f"{side.documents:,}", f"{side.rows:,}", f"{side.tokens:,}"]
                    for name, side in data.sides.items()
                ),
            ),
            "## Origin",
            _table(["", ""], ([name.partition(".")[2], value] for name, value in tags.items())),
            "",
        ]
    )


def _search(gate: GateRecord) -> Iterable[str]:
    if gate.compared > 1:
        yield (
            f"The configuration is the best of {gate.compared:,} that were compared by their "
            "scores on the validation side."
        )
    if gate.earlier:
        plural = "s were" if gate.earlier > 1 else " was"
        yield (
            f"{gate.earlier:,} other model{plural} judged on the same test records before, so the "
            f"gate's intervals have a level of {100 * gate.confidence:.4g} %."
        )


def _tasks(evaluation: EvaluationRecord) -> Iterable[str]:
    if not evaluation.tasks:
        return
    yield "## lm-eval's tasks"
    rows = (
        [name, f"{score.value:.4g}", "" if score.stderr is None else f"{score.stderr:.2g}"]
        for name, score in evaluation.tasks.items()
    )
    yield _table(["metric", "value", "standard error"], rows)


def _metric_rows(evaluation: EvaluationRecord) -> Iterable[Sequence[str]]:
    for name, item in evaluation.metrics.items():
        baseline = evaluation.baselines.get(name)
        yield (
            name,
            f"{item.value:.4g}",
            f"{item.low:.4g} to {item.high:.4g}",
            "" if baseline is None else f"{baseline:.4g}",
        )


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

"""The steps after training, one after another, with the artifacts of each."""

from __future__ import annotations

from kfp import dsl

from steadytrain.components.evaluate.artifacts import evaluate
from steadytrain.components.register.artifacts import promote, register


def evaluate_and_register(
    *,
    resolved: dsl.Artifact,
    data: dsl.Dataset,
    model: dsl.Model,
    evaluation: dsl.Artifact,
    decision: dsl.Artifact,
    metrics: dsl.Metrics,
    classes: dsl.ClassificationMetrics,
    page: dsl.HTML,
    version: dsl.Artifact,
) -> bool:
    """Run the steps. In the end, `version` says whether the model is the champion.

    Returns:
        Whether the gate let the candidate become champion.
    """
    promoted = evaluate(
        resolved=resolved,
        data=data,
        model=model,
        evaluation=evaluation,
        decision=decision,
        metrics=metrics,
        classes=classes,
        page=page,
    )
    register(resolved=resolved, version=version)
    if promoted:
        promote(resolved=resolved, champion=version)
    return promoted

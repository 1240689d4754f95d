"""Adapt KFP artifacts to registration and promotion, and their records to KFP artifacts."""

from __future__ import annotations

from pathlib import Path

from kfp import dsl

from steadytrain.components.evaluate.artifacts import evaluate
from steadytrain.components.register.step import promote as promote_version
from steadytrain.components.register.step import run
from steadytrain.components.shared.config import RunConfig, load
from steadytrain.components.shared.records import RegistrationRecord
from steadytrain.components.shared.tracking import run_links, version_link
from steadytrain.components.shared.workspace import Workspace


def register(*, resolved: dsl.Artifact, version: dsl.Artifact) -> None:
    """Register the run's model."""
    config = load(Path(resolved.path))
    _publish(config, run(config), version)


def promote(*, resolved: dsl.Artifact, champion: dsl.Artifact) -> None:
    """Promote the run's model."""
    config = load(Path(resolved.path))
    _publish(config, promote_version(config), champion)


def _publish(config: RunConfig, record: RegistrationRecord, artifact: dsl.Artifact) -> None:
    record.save(Path(artifact.path))
    workspace = Workspace.of(config)
    artifact.metadata.update(
        model_name=record.model_name,
        version=record.version,
        champion=record.champion,
        **run_links(config, workspace),
        **version_link(config, workspace, record.model_name, record.version),
    )


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

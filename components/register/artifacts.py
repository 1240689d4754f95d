"""From KFP artifacts to registration and promotion, and from their records back."""

from __future__ import annotations

from pathlib import Path

from kfp import dsl

from steadytrain.components.register.promote import promote as promote_version
from steadytrain.components.register.step import run
from steadytrain.components.shared.config import load
from steadytrain.components.shared.records import RegistrationRecord


def register(*, resolved: dsl.Artifact, version: dsl.Artifact) -> None:
    """Registers the run's model."""
    _publish(run(load(Path(resolved.path))), version)


def promote(*, resolved: dsl.Artifact, champion: dsl.Artifact) -> None:
    """Promotes the run's model."""
    _publish(promote_version(load(Path(resolved.path))), champion)


def _publish(record: RegistrationRecord, artifact: dsl.Artifact) -> None:
    record.save(Path(artifact.path))
    artifact.metadata.update(
        model_name=record.model_name, version=record.version, champion=record.champion
    )

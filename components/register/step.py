"""The register step: the run's model becomes a version with the alias `candidate`."""

from __future__ import annotations

from collections.abc import Set
from functools import partial

from steadytrain.components.evaluate.scoring import judged_records, trained_model
from steadytrain.components.register.card import model_card
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.environment import code_origin
from steadytrain.components.shared.pagination import all_found
from steadytrain.components.shared.records import (
    DataRecord,
    EvaluationRecord,
    RegistrationRecord,
    TrainRecord,
)
from steadytrain.components.shared.registry.verdict import decision
from steadytrain.components.shared.registry.versions import (
    Registry,
    Version,
    gate_tags,
    profile_tag,
    version_tags,
)
from steadytrain.components.shared.stage import stage
from steadytrain.components.shared.tracking import parent_run
from steadytrain.components.shared.tracking.connect import Tracking, tracking_errors
from steadytrain.components.shared.tracking.run import MARK
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.tasks.registry import OpenTask

CARD = "README.md"


def run(config: RunConfig) -> RegistrationRecord:
    """Register the run's model, whatever the gate decided.

    If the run has already registered these weights, it keeps that version.

    Raises:
        BadInput: the steps before this one have not run, or ran with another model or
            configuration.
        TrackingError: the registry cannot be used.
    """
    with stage(config, "register") as current:
        workspace = current.workspace
        data = DataRecord.load(workspace.record("preprocess"))
        train = TrainRecord.load(workspace.record("train"))
        evaluation = EvaluationRecord.load(workspace.record("evaluate"))
        gate = decision(config, workspace, train.weights_digest)
        registry = Registry(config, workspace)
        tags = version_tags(config, data, train)
        version = registry.of_run(tags)
        if version is None:
            card = model_card(config, data, train, evaluation, gate, tags)
            with tracking_errors(registry.tracking.uri, others=False):
                model_uri = _log(config, workspace, data, train, tags, card)
            current.check()
            about = tags | profile_tag(data) | gate_tags(gate) | code_origin()
            with tracking_errors(registry.tracking.uri, others=False):
                run_id = parent_run(config, workspace)
                version = _register_once(registry, run_id, config.name, model_uri, about, card)
        else:
            current.reused = True
        current.check()
        registry.name_candidate(version)
        champion = registry.champion()
        record = RegistrationRecord(
            model_name=registry.name,
            version=version.number,
            model_uri=version.uri,
            champion=champion is not None and champion.number == version.number,
            reason=gate.reason,
        )
        record.save(workspace.record("register"))
        current.summary = f"version {version.number} of {registry.name}"
        return record


def _log(
    config: RunConfig,
    workspace: Workspace,
    data: DataRecord,
    train: TrainRecord,
    tags: dict[str, str],
    card: str,
) -> str:
    """Log the model and its card to the run's MLflow run, and return the model's URI."""
    import mlflow

    packager, records = OpenTask(config, data).packager, judged_records(config, data)
    with mlflow.start_run(run_id=parent_run(config, workspace)):
        mlflow.log_text(card, CARD)
        model = trained_model(train)
        return packager.log_model(model, name=config.name, records=records, metadata=tags)


def _register_once(
    registry: Registry, run_id: str, name: str, model_uri: str, tags: dict[str, str], card: str
) -> Version:
    """Register the version, unless another process of the same run was faster."""
    with registry.locked() as check:
        version = registry.of_run(tags)
        wanted = registry.models_of_run(tags) | ({model_uri} if version is None else set())
        _remove_orphans(registry.tracking, run_id, name, wanted)
        return version or registry.register(model_uri, tags, card, check)


def _remove_orphans(tracking: Tracking, run_id: str, name: str, wanted: Set[str]) -> None:
    """Delete the models that earlier requests and processes of a run left behind.

    MLflow creates a model before it has files, and a version of it is made later. A lost answer, or
    a process that dies, leaves a model that is pending, or that is ready and has no version. In a
    run that a user gives (MLFLOW_RUN_ID), one that is ready may be the user's own.

    Args:
        wanted: addresses of the models that have a version, or are about to get one.
    """
    from mlflow.entities import LoggedModelStatus

    mine = f"source_run_id = '{run_id}' AND name = '{name}'"
    search = partial(tracking.client.search_logged_models, [tracking.experiment_id], mine)
    ours = MARK in tracking.client.get_run(run_id).data.tags
    models = list(all_found(lambda token: search(page_token=token)))
    done = [model for model in models if model.status == LoggedModelStatus.READY]
    last = max((model.creation_timestamp for model in done), default=0)
    for model in models:
        # Another process of this run may still write one that is newer. One that it has written
        # is not missed: that process waits for the lock, and then finds the version.
        gone = ours if model in done else model.creation_timestamp <= last
        if gone and wanted.isdisjoint({model.model_uri, model.artifact_location}):
            tracking.client.delete_logged_model(model.model_id)

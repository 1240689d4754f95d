"""The register step: the run's model becomes a version with the alias `candidate`."""

from __future__ import annotations

from functools import partial

from steadytrain.components.evaluate.scoring import judged_records, trained_model
from steadytrain.components.register.card import model_card
from steadytrain.components.shared.code_origin import code_origin
from steadytrain.components.shared.config import RunConfig
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
                _remove_unfinished(registry.tracking, parent_run(config, workspace), config.name)
            current.check()
            about = tags | profile_tag(data) | gate_tags(gate) | code_origin()
            version = _register_once(registry, model_uri, about, card)
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


def _remove_unfinished(tracking: Tracking, run_id: str, name: str) -> None:
    """Delete what earlier requests and processes left of the model that was just logged.

    MLflow creates the model before it has files. A lost answer, or a process that dies, leaves it
    pending.
    """
    from mlflow.entities import LoggedModelStatus

    mine = f"source_run_id = '{run_id}' AND name = '{name}'"
    search = partial(tracking.client.search_logged_models, [tracking.experiment_id], mine)
    models = list(all_found(lambda token: search(page_token=token)))
    done = [model for model in models if model.status == LoggedModelStatus.READY]
    last = max((model.creation_timestamp for model in done), default=0)
    for model in models:
        # Another process of this run may still write one that is newer.
        if model not in done and model.creation_timestamp <= last:
            tracking.client.delete_logged_model(model.model_id)


def _register_once(registry: Registry, model_uri: str, tags: dict[str, str], card: str) -> Version:
    """Register the version, unless another process of the same run was faster."""
    with registry.locked() as check:
        return registry.of_run(tags) or registry.register(model_uri, tags, card, check)

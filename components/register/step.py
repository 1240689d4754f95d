"""The steps register and promote.

The run's model becomes a version with the alias `candidate`. Promotion moves the alias `champion`
to it, if the gate's decision still holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steadytrain.components.evaluate.scoring import judged_records, trained_model
from steadytrain.components.evaluate.step import kfp_evaluate
from steadytrain.components.shared.config import RunConfig, load
from steadytrain.components.shared.environment import code_origin
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.pagination import all_items
from steadytrain.components.shared.quantities import duration
from steadytrain.components.shared.records import (
    DataRecord,
    EvaluationRecord,
    GateRecord,
    RegistrationRecord,
    TrainRecord,
)
from steadytrain.components.shared.registry import (
    RUN,
    WEIGHTS,
    Registry,
    Version,
    decision,
    gate_tags,
    profile_tag,
    version_tags,
)
from steadytrain.components.shared.stage import Stage, stage
from steadytrain.components.shared.tracking import parent_run, run_links, version_link
from steadytrain.components.shared.tracking.connect import Tracking, tracking_errors
from steadytrain.components.shared.tracking.run import MARK
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.tasks.base import OpenTask

if TYPE_CHECKING:
    from kfp import dsl


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
            + (
                f"the best {train.metric} of the validation side was {train.best_score:.4g}, at "
                f"step {train.best_step:,}."
                if train.validated
                else f"the training loss of the last step was {train.best_score:.4g}, and nothing "
                "was validated."
            ),
            "## Gate",
            f"{gate.reason[0].upper()}{gate.reason[1:]}.",
            *_search(gate, config.gate.promised),
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


def _search(gate: GateRecord, promised: float | None) -> Iterable[str]:
    if gate.compared > 1:
        where = "the validation side" if promised is None else "held-out folds"
        yield (
            f"The configuration is the best of {gate.compared:,} that were compared by their "
            f"scores on {where}."
        )
    if promised is not None:
        yield f"Corrected for this choice, the search promised a loss of {promised:.4g}."
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
    models = list(all_items(lambda token: search(page_token=token)))
    done = [model for model in models if model.status == LoggedModelStatus.READY]
    last = max((model.creation_timestamp for model in done), default=0)
    for model in models:
        # Another process of this run may still write one that is newer. One that it has written
        # is not missed: that process waits for the lock, and then finds the version.
        gone = ours if model in done else model.creation_timestamp <= last
        if gone and wanted.isdisjoint({model.model_uri, model.artifact_location}):
            tracking.client.delete_logged_model(model.model_id)


def promote(config: RunConfig) -> RegistrationRecord:
    """Make the registered version champion if the gate allows it, and record the gate's reason.

    Write the record "promote", and "gate" if the gate decided again.

    MLflow has no compare-and-swap: it sets an alias whatever its value was before. So promotion
    takes a lock and reads the alias again while it holds the lock. If another model has become
    champion since the gate decided, the gate decides again, against that one. Promotion releases
    the lock meanwhile, so it never holds the lock for more than a moment. After it writes the
    alias, it reads the alias back under the lock.

    One gap remains: whoever does not take the lock can move the alias between our last read and
    our write. That can be a person who edits it by hand, another program, or a run with a different
    lock address. Runs that share a registry but not an output folder must share `registry.lock`.

    Raises:
        BadInput: the steps before this one have not run, or ran with another model or
            configuration.
        RunBusy: another process holds the lock for too long.
        TrackingError: the registry cannot be used.
        SteadytrainError: somebody else moved the alias while it was being written.
    """
    with stage(config, "promote") as current:
        workspace = current.workspace
        registered = RegistrationRecord.load(workspace.record("register"))
        registry = Registry(config, workspace)
        ours = _registered(registry, registered)
        gate = decision(config, workspace, ours.tags[WEIGHTS])
        while gate.promoted and not _take_alias(registry, ours, gate, current):
            gate = _decide_again(registry, config, current)
        registry.tag_decision(ours, gate)
        record = registered.model_copy(update={"champion": gate.promoted, "reason": gate.reason})
        record.save(workspace.record("promote"))
        current.summary = gate.reason
        return record


def _registered(registry: Registry, record: RegistrationRecord) -> Version:
    """Return the version that this run registered, as stored in the registry.

    Raises:
        BadInput: the version does not exist, or this run did not register it.
    """
    version = registry.numbered(record.version) if record.model_name == registry.name else None
    if version is None or version.tags.get(RUN) != registry.run_id or WEIGHTS not in version.tags:
        raise BadInput(
            f"version {record.version} of {record.model_name} is not one that this run has "
            f"registered as {registry.name}",
            remedy="run the register step again, with this configuration",
        )
    return version


def _take_alias(registry: Registry, ours: Version, gate: GateRecord, current: Stage) -> bool:
    """Take the alias if the champion that the candidate beat still has it.

    Returns:
        Whether the alias names our version now.
    """
    with registry.locked() as check:
        holder = registry.champion()
        if holder is not None and holder.number == ours.number:
            return True
        taken = (holder.number, holder.tags.get(WEIGHTS, "")) if holder else (None, "")
        if taken != (gate.champion_version, gate.champion_weights):
            return False
        current.check()
        registry.name_champion(ours, gate, check)
    return True


def _decide_again(registry: Registry, config: RunConfig, current: Stage) -> GateRecord:
    # Imported here because it imports torch and is rarely needed.
    from steadytrain.components.evaluate.step import decide, load_candidate, reporting_splits

    candidate = load_candidate(config, current.workspace)
    with reporting_splits(current):
        gate = decide(candidate, registry.champion(), registry, current)
    gate.save(current.workspace.record("gate"))
    return gate


def kfp_register(*, resolved: dsl.Artifact, version: dsl.Artifact) -> None:
    """Register the run's model."""
    config = load(Path(resolved.path))
    _publish(config, run(config), version)


def kfp_promote(*, resolved: dsl.Artifact, champion: dsl.Artifact) -> None:
    """Promote the run's model."""
    config = load(Path(resolved.path))
    _publish(config, promote(config), champion)


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


def kfp_evaluate_and_register(
    *, resolved: dsl.Artifact, version: dsl.Artifact, **others: Any
) -> bool:
    """Run the steps. In the end, `version` says whether the model is the champion.

    Args:
        others: the other artifacts that `kfp_evaluate` takes.

    Returns:
        Whether the gate let the candidate become champion.
    """
    promoted = kfp_evaluate(resolved=resolved, **others)
    kfp_register(resolved=resolved, version=version)
    if promoted:
        kfp_promote(resolved=resolved, champion=version)
    return promoted

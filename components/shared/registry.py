"""What a gate decision is about: it is valid for one model and one set of rules.

A record of an earlier model, another configuration or another run must not decide about this model.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version as installed_version
from typing import Any

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.digest import code_digest, value_digest
from steadytrain.components.shared.effects import Use
from steadytrain.components.shared.errors import BadInput, SteadytrainError
from steadytrain.components.shared.lease import lock
from steadytrain.components.shared.pagination import all_items
from steadytrain.components.shared.records import DataRecord, GateRecord, Subject, TrainRecord
from steadytrain.components.shared.tracking import use_tracking
from steadytrain.components.shared.tracking.batches import value
from steadytrain.components.shared.tracking.connect import tracking_errors
from steadytrain.components.shared.tracking.finish import FINGERPRINT
from steadytrain.components.shared.workspace import Workspace

_NAMES = {
    "schema_version": "version of the record",
    "run_id": "run",
    "model_name": "registered model",
    "champion_alias": "alias",
    "weights_digest": "model (digest of the weights)",
    "rules": "configuration of data, evaluation and gate (digest)",
}


def decided_about(config: RunConfig, weights_digest: str) -> Subject:
    """Return the subject of a gate decision, for the digest of the candidate's weights."""
    return Subject(
        run_id=config.run_id,
        model_name=config.model_name,
        champion_alias=config.registry.champion_alias,
        weights_digest=weights_digest,
        rules=value_digest(config.counted(Use.GATE)),
    )


def decision(config: RunConfig, workspace: Workspace, weights_digest: str) -> GateRecord:
    """Return the gate's decision about these weights.

    Raises:
        BadInput: if it is missing or is about something else.
    """
    path = workspace.record("gate")
    gate = GateRecord.load(path)
    wanted = decided_about(config, weights_digest).model_dump()
    for name, decided in gate.subject.model_dump().items():
        if decided != wanted[name]:
            raise BadInput(
                f"{path} is a decision about another {_NAMES[name]}: {decided}, not {wanted[name]}",
                remedy="run the evaluate step again, with this configuration",
            )
    return gate


SPLIT, LABELS, TASK = (
    "steadytrain.split_digest",
    "steadytrain.labels_digest",
    "steadytrain.task",
)
LEARNED_UNTIL = "steadytrain.learned_until"
RUN, WEIGHTS = "steadytrain.pipeline_run", "steadytrain.weights_digest"
TEST = "steadytrain.test_digest"
INPUTS, PROFILE = "steadytrain.inputs_digest", "steadytrain.data_profile"
OF_CHAMPIONS = "steadytrain.champion_alias."
"""Prefix of a registered model's tags. The rest of the tag is an alias of its champions, in lower
case."""
JUDGED = "steadytrain.judged."
"""Prefix of a registered model's tags: the test side and the weights of a version that is removed,
so that it still counts as a model that was judged on these records."""


def version_tags(config: RunConfig, data: DataRecord, train: TrainRecord) -> dict[str, str]:
    """Return the tags that identify a version: its origin, and what it may be compared with."""
    return {
        RUN: config.run_id,
        WEIGHTS: train.weights_digest,
        **comparable_tags(config, data),
        **({LEARNED_UNTIL: json.dumps(data.learned_until)} if data.learned_until else {}),
        FINGERPRINT: data.fingerprint,
        INPUTS: data.inputs_digest,
        "steadytrain.config_digest": config.digest(),
        "steadytrain.code_version": f"{installed_version('steadytrain')}+{code_digest()[:12]}",
        "steadytrain.parent_model": config.model.base or "none (from scratch)",
    }


def profile_tag(data: DataRecord) -> dict[str, str]:
    """Return a tag with the profile of a version's data, for comparison in `detect_change`."""
    return {PROFILE: data.profile.model_dump_json()} if data.profile else {}


def gate_tags(gate: GateRecord, *, champion: bool = False) -> dict[str, str]:
    """Return tags with the gate's decision about a version, and the champion it was compared to.

    Args:
        champion: whether the version has become champion. Until then it may still lose to another.
    """
    passed = "promoted" if champion else "passed"
    failed = "undecided" if gate.undecided else "rejected"
    return {
        "steadytrain.gate": passed if gate.promoted else failed,
        "steadytrain.gate_reason": value(gate.reason),
        "steadytrain.compared_with": gate.champion_version or "none (there was no champion)",
        TEST: gate.test_digest or "unknown",
    }


def comparable_tags(config: RunConfig, data: DataRecord) -> dict[str, str]:
    """Return the tags that two versions must share to be compared on the same test side."""
    return {
        TASK: config.data.task,
        SPLIT: data.split_digest,
        LABELS: value_digest(data.labels),
    }


@dataclass(frozen=True)
class Version:
    """A registered version.

    uri: MLflow's address of its model.
    """

    number: str
    tags: Mapping[str, str]
    uri: str


class Registry:
    """The registered model of a run.

    Every method raises TrackingError if the registry cannot be used.
    """

    def __init__(self, config: RunConfig, workspace: Workspace) -> None:
        self.tracking = use_tracking(config, workspace)
        self.name = config.model_name
        self.run_id = config.run_id
        self.aliases = config.registry
        self.lock_address = config.registry.lock or str(workspace.locks)

    def champion(self) -> Version | None:
        """Return the version with the champion's alias, or None."""
        return self.by_alias(self.aliases.champion_alias)

    def by_alias(self, alias: str) -> Version | None:
        """Return the version with an alias, or None."""
        from mlflow.exceptions import MlflowException

        with self._errors():
            try:
                version = self.tracking.client.get_model_version_by_alias(self.name, alias)
            except MlflowException as error:
                if error.error_code not in {"RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"}:
                    raise
                return None
            return self._version(version)

    def numbered(self, number: str) -> Version | None:
        """Return the version with a number, or None."""
        from mlflow.exceptions import MlflowException

        with self._errors():
            try:
                return self._version(self.tracking.client.get_model_version(self.name, number))
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
                return None

    def of_run(self, tags: Mapping[str, str]) -> Version | None:
        """Return the version that this run registered with these weights, or None."""
        with self._errors():
            return next(map(self._version, self._of_run(tags)), None)

    def models_of_run(self, tags: Mapping[str, str]) -> set[str]:
        """Return the addresses of the models of which this run registered versions."""
        with self._errors():
            models = self._all_of_run(tags)
            # Some releases of MLflow note only the one or the other.
            return {
                source for item in models for source in (item.source, f"models:/{item.model_id}")
            }

    def _of_run(self, tags: Mapping[str, str]) -> list[Any]:
        versions = self._all_of_run(tags)
        same = [item for item in versions if item.tags.get(WEIGHTS) == tags[WEIGHTS]]
        return sorted(same, key=lambda item: int(item.version))

    def _all_of_run(self, tags: Mapping[str, str]) -> list[Any]:
        query = f"name = '{self.name}' AND tags.`{RUN}` = '{tags[RUN]}'"
        search = self.tracking.client.search_model_versions
        return list(all_items(lambda token: search(query, page_token=token)))

    def judged_on(self, test_digest: str, *, besides: str) -> int:
        """Return how many other models were judged on the same test side.

        Args:
            besides: digest of the weights that do not count.
        """
        query = f"name = '{self.name}' AND tags.`{TEST}` = '{test_digest}'"
        with self._errors():
            search = self.tracking.client.search_model_versions
            versions = all_items(lambda token: search(query, page_token=token))
            there = {item.tags.get(WEIGHTS) for item in versions}
        prefix = f"{JUDGED}{test_digest}."
        removed = {tag.removeprefix(prefix) for tag in self._model_tags() if tag.startswith(prefix)}
        return len((there | removed) - {besides})

    def remember_judged(self, tags: Mapping[str, str]) -> None:
        """Let a version that is about to be removed still count in `judged_on`.

        Args:
            tags: of the version.
        """
        tag = f"{JUDGED}{tags.get(TEST, 'unknown')}.{tags.get(WEIGHTS, 'unknown')}"
        with self._errors():
            self.tracking.client.set_registered_model_tag(self.name, tag, "true")

    def _model_tags(self) -> Mapping[str, str]:
        """Return the tags of the registered model, if it exists."""
        from mlflow.exceptions import MlflowException

        with self._errors():
            try:
                return dict(self.tracking.client.get_registered_model(self.name).tags)
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
                return {}

    def register(
        self,
        model_uri: str,
        tags: Mapping[str, str],
        description: str,
        check: Callable[[], None],
    ) -> Version:
        """Register a new version of a logged model.

        Args:
            model_uri: the model.
            tags: of the version.
            description: of the version, in Markdown.
            check: the check of the lock that the caller holds.
        """
        import mlflow

        check()
        # MLflow announces the version on stderr. The step does that itself.
        with self._errors(), contextlib.redirect_stderr(io.StringIO()):
            registered = mlflow.register_model(model_uri, self.name, tags=dict(tags))
            # A request whose answer was lost made a version, too. A search may find neither yet.
            made, *again = self._of_run(tags) or [registered]
            for version in again:
                self.tracking.client.delete_model_version(self.name, version.version)
            self.tracking.client.update_model_version(self.name, made.version, description)
            return self._version(made)

    def name_candidate(self, version: Version) -> None:
        """Move the candidate's alias to a version.

        Raises:
            BadInput: if the alias belongs to champions, in this configuration or another one.
        """
        alias = self.aliases.candidate_alias
        with self.locked() as check:
            tags = self._model_tags()
            reserved = {
                "champion",
                self.aliases.champion_alias.lower(),
                *(tag.removeprefix(OF_CHAMPIONS) for tag in tags if tag.startswith(OF_CHAMPIONS)),
            }
            if alias.lower() in reserved:
                raise BadInput(
                    f"registry.candidate_alias = {alias!r}: this alias of {self.name} is the "
                    "champion's, which only a promotion moves",
                    remedy="choose another one, such as candidate",
                )
            check()
            self._point(alias, version)

    def name_champion(self, version: Version, gate: GateRecord, check: Callable[[], None]) -> None:
        """Move the champion's alias to a version that the gate promoted.

        Args:
            version: the version.
            gate: the decision about this version.
            check: the check of the lock that the caller holds.

        Raises:
            SteadytrainError: if the gate did not promote this version, or someone else moved the
                alias at the same time.
        """
        alias, about = self.aliases.champion_alias, gate.subject
        recorded = (about.model_name, about.champion_alias, about.run_id, about.weights_digest)
        ours = (self.name, alias, version.tags.get(RUN), version.tags.get(WEIGHTS))
        if not gate.promoted or recorded != ours:
            raise SteadytrainError(
                f"version {version.number} of {self.name} is not the model that passed the gate",
                remedy="run the evaluate, register and promote steps again",
            )
        check()
        with self._errors():
            # Set the tag first: an alias that is reserved for champions but unused does no harm.
            self.tracking.client.set_registered_model_tag(
                self.name, f"{OF_CHAMPIONS}{alias.lower()}", "true"
            )
        # The requests before may have lasted for minutes.
        check()
        self._point(alias, version)
        written = self.champion()
        if written is None or written.number != version.number:
            raise SteadytrainError(
                f"alias {alias!r} of {self.name} was set to version {version.number}, but names "
                f"{'none' if written is None else f'version {written.number}'} now",
                remedy="someone moved it by hand at the same time: check which version is "
                "right, then run the promote step again",
            )

    def tag_decision(self, version: Version, gate: GateRecord) -> None:
        """Tag a version with a decision that was carried out: it is champion, or has lost."""
        with self._errors():
            for tag, text in gate_tags(gate, champion=gate.promoted).items():
                self.tracking.client.set_model_version_tag(self.name, version.number, tag, text)

    def _point(self, alias: str, version: Version) -> None:
        with self._errors():
            self.tracking.client.set_registered_model_alias(self.name, alias, version.number)

    def locked(self) -> contextlib.AbstractContextManager[Callable[[], None]]:
        """Hold the lock that all runs with the same lock address share. Yield the lock's check."""
        return lock(self.lock_address, f"registry-{self.name}")

    def _errors(self) -> contextlib.AbstractContextManager[None]:
        return tracking_errors(self.tracking.uri)

    def _version(self, found: Any) -> Version:
        number = str(found.version)
        return Version(number, dict(found.tags), f"models:/{self.name}/{number}")

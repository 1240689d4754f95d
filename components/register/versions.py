"""The versions of one registered model, their tags and aliases, in MLflow's registry."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version as installed_version
from typing import Any

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.digest import code_digest, value_digest
from steadytrain.components.shared.lease import lease
from steadytrain.components.shared.records import DataRecord, TrainRecord
from steadytrain.components.shared.tracking import use_tracking
from steadytrain.components.shared.tracking.connect import tracking_errors
from steadytrain.components.shared.workspace import Workspace

SPLIT, LABELS, TASK = (
    "steadytrain.split_digest",
    "steadytrain.labels_digest",
    "steadytrain.task",
)
RUN, WEIGHTS = "steadytrain.pipeline_run", "steadytrain.weights_digest"
INPUTS, PROFILE = "steadytrain.inputs_digest", "steadytrain.data_profile"


def version_tags(config: RunConfig, data: DataRecord, train: TrainRecord) -> dict[str, str]:
    """What a version is known by: where it comes from, and what it may be compared with."""
    return {
        RUN: config.run_id,
        WEIGHTS: train.weights_digest,
        **comparable_tags(config, data),
        "steadytrain.data_fingerprint": data.fingerprint,
        INPUTS: data.inputs_digest,
        "steadytrain.config_digest": config.digest(),
        "steadytrain.code_version": f"{installed_version('steadytrain')}+{code_digest()[:12]}",
        "steadytrain.parent_model": config.model.base or "none (from scratch)",
    }


def profile_tag(data: DataRecord) -> dict[str, str]:
    """What a version's data are like, for later ones to be compared with (components/look)."""
    return {PROFILE: data.profile.model_dump_json()} if data.profile else {}


def comparable_tags(config: RunConfig, data: DataRecord) -> dict[str, str]:
    """What two versions must have in common to be compared on one test side."""
    return {
        TASK: config.data.task,
        SPLIT: data.split_digest,
        LABELS: value_digest(data.labels),
    }


@dataclass(frozen=True)
class Version:
    """A registered version. uri: MLflow's address of its model."""

    number: str
    tags: Mapping[str, str]
    uri: str


class Registry:
    """The registered model of a run.

    Every method raises TrackingError where the registry cannot be used.
    """

    def __init__(self, config: RunConfig, workspace: Workspace) -> None:
        self.tracking = use_tracking(config, workspace)
        self.name = config.model_name
        self.lock_address = config.registry.lock or str(workspace.locks)

    def by_alias(self, alias: str) -> Version | None:
        """The version that an alias names, or None."""
        from mlflow.exceptions import MlflowException

        with self._errors():
            try:
                found = self.tracking.client.get_model_version_by_alias(self.name, alias)
            except MlflowException as error:
                if error.error_code not in {"RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"}:
                    raise
                return None
            return self._version(found)

    def of_run(self, tags: Mapping[str, str]) -> Version | None:
        """The version that this run has registered of these weights, or None."""
        query = f"name = '{self.name}' AND tags.`{RUN}` = '{tags[RUN]}'"
        with self._errors():
            versions = self.tracking.client.search_model_versions(query)
            same = [item for item in versions if item.tags.get(WEIGHTS) == tags[WEIGHTS]]
            return self._version(min(same, key=lambda item: int(item.version))) if same else None

    def register(self, model_uri: str, tags: Mapping[str, str], description: str) -> Version:
        """A new version of a logged model."""
        import mlflow

        # MLflow announces the version on stderr, which the step does itself.
        with self._errors(), contextlib.redirect_stderr(io.StringIO()):
            made = mlflow.register_model(model_uri, self.name, tags=dict(tags))
            self.tracking.client.update_model_version(self.name, made.version, description)
            return self._version(made)

    def set_alias(self, alias: str, version: Version) -> None:
        """Points an alias at a version, wherever it pointed before."""
        with self._errors():
            self.tracking.client.set_registered_model_alias(self.name, alias, version.number)

    @contextlib.contextmanager
    def locked(self) -> Iterator[Callable[[], None]]:
        """Alone among all runs that use the same lock address; yields the lock's check."""
        with lease(self.lock_address, f"registry-{self.name}") as check:
            yield check

    def _errors(self) -> contextlib.AbstractContextManager[None]:
        return tracking_errors(self.tracking.uri)

    def _version(self, found: Any) -> Version:
        number = str(found.version)
        return Version(number, dict(found.tags), f"models:/{self.name}/{number}")

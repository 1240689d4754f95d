"""Model versions that were passed over: registered as candidate, never champion, without an alias.

When MLflow deletes a version, it keeps the version's files. This module deletes them too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.records import RegistrationRecord
from steadytrain.components.shared.registry import RUN, Registry
from steadytrain.components.shared.tracking.connect import tracking_errors
from steadytrain.components.shared.workspace import Workspace


class StaleVersion:
    """The version that a run registered, if nothing needs it anymore.

    Every method raises TrackingError if the registry cannot be used.
    """

    def __init__(self, config: RunConfig, workspace: Workspace) -> None:
        self.record = RegistrationRecord.load(workspace.record("register"))
        path = workspace.record("promote")
        promotion = RegistrationRecord.load(path) if path.is_file() else self.record
        # An earlier version of this run may be the one that was promoted.
        self.was_champion = self.record.champion or (
            promotion.champion and promotion.same_version(self.record)
        )
        self.run_id = config.run_id
        self.registry = Registry(config, workspace)

    @property
    def is_there(self) -> bool:
        """Whether it is still registered, has no alias, and never was champion."""
        return not self.was_champion and self._current_version() is not None

    @property
    def bytes(self) -> int:
        """Size of its files."""
        with self._errors():
            return sum(size for _, size in _files(self._files()))

    def remove(self) -> bool:
        """Delete the version and its files.

        Returns:
            False if it is already gone or has an alias now.
        """
        with self.registry.locked() as check:
            version = self._current_version()
            if version is None:
                return False
            files = self._files()
            self.registry.remember_judged(version.tags)
            check()
            with self._errors():
                client = self.registry.tracking.client
                client.delete_model_version(self.record.model_name, self.record.version)
                if version.model_id:
                    client.delete_logged_model(version.model_id)
                files.delete_artifacts()
        return True

    def _current_version(self) -> Any | None:
        from mlflow.exceptions import MlflowException

        client, name, number = self.registry.tracking.client, *self._named
        with self._errors():
            try:
                version = client.get_model_version(name, number)
                aliases = client.get_registered_model(name).aliases
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
                return None
        named = number in {str(holder) for holder in aliases.values()}
        return None if named or version.tags.get(RUN) != self.run_id else version

    def _files(self) -> Any:
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        uri = self.registry.tracking.client.get_model_version_download_uri(*self._named)
        return get_artifact_repository(uri)

    @property
    def _named(self) -> tuple[str, str]:
        return self.record.model_name, self.record.version

    def _errors(self) -> Any:
        return tracking_errors(self.registry.tracking.uri)


def _files(repository: Any, folder: str | None = None) -> Iterator[tuple[str, int]]:
    for item in repository.list_artifacts(folder):
        if item.is_dir:
            yield from _files(repository, item.path)
        else:
            yield item.path, item.file_size or 0

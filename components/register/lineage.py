"""From a model back to its data and code, and from data forward to every model trained on it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from steadytrain.components.shared.environment import ORIGIN
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.pagination import all_items
from steadytrain.components.shared.registry import RUN, WEIGHTS
from steadytrain.components.shared.tracking.connect import (
    short_timeouts,
    shown,
    tracking_errors,
)
from steadytrain.components.shared.tracking.finish import ENVIRONMENT, FINGERPRINT, PLAN
from steadytrain.components.shared.tracking.run import find_version, reading_client
from steadytrain.components.shared.tracking.store import sqlite_uri

_TAGS = {
    "run": RUN,
    "weights": WEIGHTS,
    "data": FINGERPRINT,
    "code": "steadytrain.code_version",
    "config": "steadytrain.config_digest",
    "base": "steadytrain.parent_model",
    "gate": "steadytrain.gate",
    "gate_reason": "steadytrain.gate_reason",
    "compared_with": "steadytrain.compared_with",
}


@dataclass(frozen=True)
class ModelLineage:
    """A registered version and what it was made from.

    made_from: the run, data, code and configuration, as the version's tags say; unknown ones are
        missing.
    origin: git commit, digest of the uncommitted changes, and image, as far as known.
    mlflow_run: id of the MLflow run.
    sources: where the data come from.
    environment: versions of Python, the system and the packages of the newest attempt, by name.
    plan: how that attempt divided its work: ranks, device, micro-batch, strategy.
    attempts: number of attempts.
    checkpoints: names of the models that MLflow has of the run's checkpoints.
    """

    model: str
    version: str
    aliases: list[str]
    made_from: dict[str, str]
    origin: dict[str, str]
    mlflow_run: str
    sources: list[str]
    environment: dict[str, str]
    plan: dict[str, Any]
    attempts: int = 0
    checkpoints: tuple[str, ...] = ()

    def as_data(self) -> dict[str, Any]:
        return asdict(self)


class LineageStore:
    """The registry of an output folder, or of MLFLOW_TRACKING_URI.

    Every method raises TrackingError if it cannot be used, and creating one raises BadInput if
    there is none.
    """

    def __init__(self, output: Path) -> None:
        store = output.absolute() / "mlflow.db"
        self.uri = os.environ.get("MLFLOW_TRACKING_URI") or sqlite_uri(store)
        self.client = reading_client(self.uri)

    def of_model(self, name: str, alias: str) -> ModelLineage:
        """Return what a version was made from.

        Raises:
            BadInput: the registry has no such model or alias.
        """
        with short_timeouts(), tracking_errors(self.uri):
            version = find_version(self.client, self.uri, f"{name}@{alias}")
            return self._lineage(version, in_detail=True)

    def trained_on(self, fingerprint: str) -> list[ModelLineage]:
        """Return every version that was trained on data with a fingerprint, oldest first.

        Raises:
            BadInput: there is none.
        """
        with short_timeouts(), tracking_errors(self.uri):
            result = [self._lineage(item) for item in self._versions(fingerprint)]
        if not result:
            raise BadInput(
                f"{shown(self.uri)} has no model that was trained on data {fingerprint}",
                remedy="give the whole fingerprint, as `steadytrain lineage MODEL@ALIAS` shows it",
            )
        return result

    def _versions(self, fingerprint: str) -> Iterator[Any]:
        quoted = fingerprint.replace("'", "")
        query = f"tags.`{FINGERPRINT}` = '{quoted}'"
        versions = all_items(
            lambda token: self.client.search_model_versions(query, page_token=token)
        )
        return iter(sorted(versions, key=lambda item: int(item.creation_timestamp)))

    def _lineage(self, version: Any, *, in_detail: bool = False) -> ModelLineage:
        tags = dict(version.tags)
        aliases = self.client.get_registered_model(version.name).aliases
        run = self.client.get_run(version.run_id) if version.run_id else None
        detail = self._detail(run) if run and in_detail else {}
        return ModelLineage(
            model=version.name,
            version=str(version.version),
            aliases=[name for name, number in aliases.items() if str(number) == version.version],
            made_from={what: tags[tag] for what, tag in _TAGS.items() if tag in tags},
            origin={tag: tags[tag] for tag in ORIGIN if tag in tags},
            mlflow_run=version.run_id or "",
            sources=_sources(run) if run else [],
            environment=_content(run, ENVIRONMENT),
            plan=_content(run, PLAN),
            **detail,
        )

    def _detail(self, run: Any) -> dict[str, Any]:
        """Return attempts and checkpoints: the children of a run, and what they made."""
        places = [run.info.experiment_id]
        query = f"tags.mlflow.parentRunId = '{run.info.run_id}'"
        children = all_items(lambda token: self.client.search_runs(places, query, page_token=token))
        ids = {child.info.run_id for child in children}
        models = all_items(lambda token: self.client.search_logged_models(places, page_token=token))
        ours = sorted(item.name for item in models if item.source_run_id in ids)
        return {"attempts": len(ids), "checkpoints": tuple(ours)}


def _content(run: Any, tag: str) -> dict[str, Any]:
    """Return the mapping in a run's tag; an empty one if there is no such run or tag."""
    content: dict[str, Any] = json.loads(run.data.tags.get(tag, "{}")) if run else {}
    return content


def _sources(run: Any) -> list[str]:
    result: list[str] = []
    for item in run.inputs.dataset_inputs:
        if item.dataset.source_type == "steadytrain":
            result += json.loads(item.dataset.source)["sources"]
    return result

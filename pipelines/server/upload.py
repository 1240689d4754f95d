"""A compiled pipeline on the server: one version per content."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kfp_server_api

from steadytrain.components.shared.digest import value_digest
from steadytrain.components.shared.errors import ServerError
from steadytrain.components.shared.kubeflow.connection import Server
from steadytrain.components.shared.pagination import named, pages
from steadytrain.pipelines.lint import read_pipeline, steps


@dataclass(frozen=True)
class Version:
    """A version of a pipeline on the server.

    uploaded: whether it is new there.
    steps: the tasks in it that run a container.
    """

    pipeline: str
    name: str
    pipeline_id: str
    version_id: str
    uploaded: bool
    steps: tuple[str, ...]

    @property
    def reference(self) -> Any:
        return kfp_server_api.V2beta1PipelineVersionReference(
            pipeline_id=self.pipeline_id, pipeline_version_id=self.version_id
        )


def version_name(path: Path) -> str:
    """Return the name of a compiled file's version. Equal contents have equal names."""
    return _described(path)[0]


def upload(server: Server, path: Path) -> Version:
    """Make sure that the server has this content as a version of the pipeline that it names.

    Safe to repeat, and to call from several processes at once.
    """
    name, pipeline, tasks = _described(path)
    pipeline_id = _make_pipeline(server, pipeline)

    def make() -> Any:
        return server.uploads.upload_pipeline_version(
            str(path), name=name, pipelineid=pipeline_id, description="compiled by steadytrain"
        )

    version, uploaded = find_or_make(lambda: _version(server, pipeline_id, name), make)
    return Version(pipeline, name, pipeline_id, version.pipeline_version_id, uploaded, tasks)


def look_up(server: Server, path: Path) -> Version:
    """Return the version that `upload` would return, without ids if it does not exist yet."""
    name, pipeline, tasks = _described(path)
    found = _find_pipeline(server, pipeline)
    version = _version(server, found.pipeline_id, name) if found else None
    if version is None:
        return Version(pipeline, name, "", "", False, tasks)
    return Version(pipeline, name, found.pipeline_id, version.pipeline_version_id, False, tasks)


def experiment_id(server: Server, name: str) -> str:
    """Return the id of an experiment. The experiment is created if it does not exist."""

    def find() -> Any:
        experiments = pages(
            server.experiments.experiment_service_list_experiments,
            "experiments",
            filter=named("display_name", name),
            **_of(server),
        )
        return next(experiments, None)

    def make() -> Any:
        content = kfp_server_api.V2beta1Experiment(display_name=name, **_of(server))
        return server.experiments.experiment_service_create_experiment(experiment=content)

    return str(find_or_make(find, make)[0].experiment_id)


def _described(path: Path) -> tuple[str, str, tuple[str, ...]]:
    """Return the version's name, the pipeline's name, and the pipeline's steps."""
    spec, platform = read_pipeline(path)
    name = f"sha256-{value_digest([spec, platform])[:16]}"
    return name, str(spec["pipelineInfo"]["name"]), tuple(steps(spec))


def _find_pipeline(server: Server, name: str) -> Any:
    pipelines = pages(
        server.pipelines.pipeline_service_list_pipelines,
        "pipelines",
        filter=named("name", name),
        **_of(server),
    )
    return next(pipelines, None)


def _make_pipeline(server: Server, name: str) -> str:
    def make() -> Any:
        # An upload would create it too, but with a first version not named after its content.
        content = kfp_server_api.V2beta1Pipeline(display_name=name, **_of(server))
        return server.pipelines.pipeline_service_create_pipeline(pipeline=content)

    return str(find_or_make(lambda: _find_pipeline(server, name), make)[0].pipeline_id)


def _version(server: Server, pipeline_id: str, name: str) -> Any:
    versions = pages(
        server.pipelines.pipeline_service_list_pipeline_versions,
        "pipeline_versions",
        pipeline_id=pipeline_id,
        filter=named("name", name),
    )
    return next(versions, None)


def find_or_make(find: Callable[[], Any], make: Callable[[], Any]) -> tuple[Any, bool]:
    """Return what `find` finds or `make` creates, and whether it was created.

    Another process may create it at the same time.
    """
    if found := find():
        return found, False
    try:
        return make(), True
    except ServerError as error:
        found = find() if error.status in (400, 409) else None
        if not found:
            raise
        return found, False


def _of(server: Server) -> dict[str, str]:
    return {"namespace": server.namespace} if server.namespace else {}

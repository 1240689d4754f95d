"""Starting a run on a server, and following it to its end."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kfp_server_api

from steadytrain.components.shared.attached import MOUNT_PATH
from steadytrain.components.shared.config import RunConfig, load, to_parameters
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.kubeflow.connection import Server, connect
from steadytrain.components.shared.workspace import Workspace
from steadytrain.pipelines.compile import Pipeline, compile_pipeline
from steadytrain.pipelines.lint import Finding
from steadytrain.pipelines.server.follow import Outcome, Steps, follow
from steadytrain.pipelines.server.upload import Version, experiment_id, upload, version_name


@dataclass(frozen=True)
class Submission:
    """What is sent to a server: all of it is shown there to everybody who may see the run.

    experiment: "" for the one that the configuration names for tracking.
    pipeline_root: where KFP keeps its artifacts; "" for the server's own place.
    service_account: of the run's pods; "" for the server's default.
    """

    config: RunConfig
    experiment: str = ""
    pipeline_root: str = ""
    service_account: str = ""

    @classmethod
    def of(
        cls,
        source: RunConfig | str | Path,
        overrides: Iterable[str] | Mapping[str, Any] = (),
        **options: str,
    ) -> Submission:
        """A submission of a configuration: a preset's name, a file, YAML text, or a RunConfig.

        Raises:
            ConfigError: with every problem of the configuration.
            BadInput: its output is a folder that pods do not share.
        """
        config = source if isinstance(source, RunConfig) else load(source, overrides)
        Workspace.of(config)  # refuses what the steps cannot write to
        if "://" not in config.output and not Path(config.output).is_absolute():
            raise BadInput(
                f"output = {config.output!r} is a folder of this machine, which pods do not share",
                remedy=f"give {MOUNT_PATH}, where every step has the shared volume, or one below",
            )
        experiment = options.pop("experiment", "") or config.tracking.experiment
        return cls(config, experiment, **options)

    @property
    def parameters(self) -> dict[str, Any]:
        """The pipeline's parameters."""
        return to_parameters(self.config, run=self.config.run_id)


@dataclass(frozen=True)
class SubmittedRun:
    """A run that was started."""

    server: Server
    run_id: str
    name: str
    version: Version

    @property
    def url(self) -> str:
        """Where the UI shows it; "" where the address serves no pages."""
        return self.server.link("runs", self.run_id)

    def wait(self, on_change: Callable[[Steps], object] = lambda _: None) -> Outcome:
        """Follows the run until it ends.

        Args:
            on_change: gets the steps whenever one of them has another state.

        Raises:
            ServerError: the server was out of reach for too long; the run goes on.
        """
        return follow(self.server, self.run_id, self.version.steps, on_change)


def submit(
    source: RunConfig | str | Path,
    overrides: Iterable[str] | Mapping[str, Any] = (),
    *,
    pipeline: Pipeline = "finetune",
    host: str = "",
    namespace: str = "",
    experiment: str = "",
    pipeline_root: str = "",
    service_account: str = "",
    tell: Callable[[Finding], object] = lambda _: None,
) -> SubmittedRun:
    """Starts a run on a Kubeflow server.

    The pipeline is uploaded where the server does not have this content yet. Credentials come
    from the environment, see `connect`; nothing secret is sent as a parameter.

    Args:
        source: a preset's name, the path of a YAML file, YAML text, or a RunConfig.
        overrides: "a.b=value" texts, or a mapping of the same.
        pipeline: "retrain" looks for new data first, and ends early where there are none.
        host: the server's address, see `connect`.
        namespace: the user's, on a server of many users.
        experiment: "" for the configuration's `tracking.experiment`.
        pipeline_root: where KFP keeps its artifacts; "" for the server's own place.
        service_account: of the run's pods; "" for the server's default.
        tell: gets what is unwise in the pipeline.

    Raises:
        BadInput: the configuration, the pipeline or the address cannot be used.
        ServerError: no connection, or the server refused; the message says which and what helps.
    """
    submission = Submission.of(
        source,
        overrides,
        experiment=experiment,
        pipeline_root=pipeline_root,
        service_account=service_account,
    )
    with tempfile.TemporaryDirectory() as folder:
        fuse = submission.config.pipeline.fuse
        path = compile_pipeline(Path(folder, "pipeline.yaml"), tell, pipeline=pipeline, fuse=fuse)
        server = connect(host, namespace)
        version = upload(server, path)
    return start(server, submission, version)


def start(server: Server, submission: Submission, version: Version) -> SubmittedRun:
    """Starts a run of an uploaded version."""
    name = submission.config.run_id
    content = kfp_server_api.V2beta1Run(
        display_name=name,
        experiment_id=experiment_id(server, submission.experiment),
        pipeline_version_reference=version.reference,
        runtime_config=kfp_server_api.V2beta1RuntimeConfig(
            parameters=submission.parameters, pipeline_root=submission.pipeline_root or None
        ),
        service_account=submission.service_account or None,
    )
    run = server.runs.run_service_create_run(run=content)
    return SubmittedRun(server, run.run_id, name, version)


def outline(
    submission: Submission, tell: Callable[[Finding], object], *, pipeline: Pipeline
) -> list[str]:
    """What `submit` would send; nothing is sent, and no server is asked."""
    with tempfile.TemporaryDirectory() as folder:
        fuse = submission.config.pipeline.fuse
        path = compile_pipeline(Path(folder, "pipeline.yaml"), tell, pipeline=pipeline, fuse=fuse)
        version, size = version_name(path), path.stat().st_size
    rest = {
        "pipeline root": submission.pipeline_root,
        "service account": submission.service_account,
    }
    return [
        f"pipeline    steadytrain-{pipeline}, version {version} ({size / 1000:.0f} kB), uploaded "
        "if the server does not have it",
        f"experiment  {submission.experiment}",
        f"run         {submission.config.run_id}",
        *(f"{name:11} {value}" for name, value in rest.items() if value),
        "parameters  config =",
        *(f"  {line}" for line in submission.parameters["config"].splitlines()),
    ]

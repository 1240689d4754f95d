"""Start a run on a server, and follow it to its end."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import kfp_server_api

from steadytrain.components.shared.cluster import Refused, Unreachable
from steadytrain.components.shared.cluster import connect as connect_to_cluster
from steadytrain.components.shared.config import RunConfig, to_parameters
from steadytrain.components.shared.config.load import Override
from steadytrain.components.shared.digest import value_digest
from steadytrain.components.shared.environment import callers_span
from steadytrain.components.shared.errors import BadInput, ServerError
from steadytrain.components.shared.kubeflow.connection import IN_CLUSTER, Server, connect
from steadytrain.components.shared.pagination import named, pages
from steadytrain.components.shared.quantities import size
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.recovery.resubmit import continuation, describes
from steadytrain.components.tune.designs import as_cross_validation, check_folds
from steadytrain.components.tune.study import check_space, study_name
from steadytrain.pipelines.cluster.nodes import misfit
from steadytrain.pipelines.compile import Finding, compile_pipeline, read_pipeline, steps
from steadytrain.pipelines.early_checks import check_plugins, check_submitted
from steadytrain.pipelines.pod_names import MOUNT_PATH, Pipeline
from steadytrain.pipelines.searches import configuration_for
from steadytrain.pipelines.server.follow import PipelineOutcome, RunPods, Steps, follow


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
    result = _find_pipeline(server, pipeline)
    version = _version(server, result.pipeline_id, name) if result else None
    if version is None:
        return Version(pipeline, name, "", "", False, tasks)
    return Version(pipeline, name, result.pipeline_id, version.pipeline_version_id, False, tasks)


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
    if existing := find():
        return existing, False
    try:
        return make(), True
    except ServerError as error:
        existing = find() if error.status in (400, 409) else None
        if not existing:
            raise
        return existing, False


def _of(server: Server) -> dict[str, str]:
    return {"namespace": server.namespace} if server.namespace else {}


_HERE = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Submission:
    """What is sent to a server. Everyone who may see the run can see all of it there.

    experiment: name of KFP's experiment; `of` fills in the configuration's for "".
    pipeline_root: where KFP keeps its artifacts; "" means the server's default.
    service_account: for the run's pods; "" means the server's default.
    """

    config: RunConfig
    experiment: str = ""
    pipeline_root: str = ""
    service_account: str = ""

    @classmethod
    def of(
        cls,
        source: RunConfig | str | Path,
        overrides: Iterable[Override] | Mapping[str, Any] = (),
        *,
        pipeline: Pipeline = "finetune",
        **options: str,
    ) -> Submission:
        """Return the submission of a configuration.

        Args:
            source: a preset's name, a file, YAML text, or a RunConfig.
            overrides: "a.b=value" strings, or a mapping with the same content.
            pipeline: the pipeline that it is for. "tune", "cross-validate" and "automl" name the
                run as the study.
            options: the other fields, such as `experiment`.

        Raises:
            ConfigError: with every problem in the configuration.
            BadInput: its output, its data or its model is a path that pods do not share, there is
                nothing to tune, or a cross-validation would have to vary something.
        """
        if isinstance(source, RunConfig):
            config = source
        else:
            config, _ = configuration_for(pipeline, source, overrides)
        check_plugins(config)
        Workspace.of(config)  # rejects an output that the steps cannot write to
        if "://" not in config.output and not Path(config.output).is_absolute():
            raise BadInput(
                f"output = {config.output!r} is a folder on this machine, which pods do not share",
                remedy=f"use {MOUNT_PATH}, where every step mounts the shared volume, or a "
                "folder below it",
            )
        check_submitted(config)
        if pipeline == "tune":
            check_space(config)
            config = config.model_copy(update={"run": study_name(config)})
        if pipeline == "automl":
            # Imported late, with what trains.
            from steadytrain.components.automl.design import as_automl

            config = config.model_copy(update={"run": study_name(as_automl(config))})
        if pipeline == "cross-validate":
            check_folds(config)
            config = config.model_copy(update={"run": study_name(as_cross_validation(config))})
        experiment = options.pop("experiment", "") or config.tracking.experiment
        return cls(config, experiment, **options)

    def in_callers_trace(self) -> Submission:
        """Return it as a part of the span that TRACEPARENT names, if the configuration has none."""
        watching, span = self.config.observability, callers_span()
        if watching.traceparent or not span:
            return self
        joined = watching.model_copy(update={"traceparent": span})
        return replace(self, config=self.config.model_copy(update={"observability": joined}))

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
        """Link to the run in the UI; "" if the address serves no pages."""
        return self.server.link("runs", self.run_id)

    def wait(
        self,
        on_change: Callable[[Steps], object] = lambda _: None,
        on_resubmission: Callable[[SubmittedRun], object] = lambda _: None,
        notify: Callable[[str], object] = lambda _: None,
    ) -> PipelineOutcome:
        """Follow the run until it ends. If it lost a step, follow the run that continues it.

        What a run's pods wait for comes from the cluster that KUBECONFIG names, if it is there.

        Args:
            on_change: called with the steps whenever the state of one of them, or what it waits
                for, changes.
            on_resubmission: called with each run that continues the one before.
            notify: called with remarks, for example that the pods cannot be seen.

        Returns:
            The outcome of the last of these runs.

        Raises:
            ServerError: the server was unreachable for too long; the run continues.
        """
        steps = self.version.steps
        pods = RunPods(self.run_id, self.server.namespace, steps, notify)
        outcome = follow(self.server, self.run_id, steps, on_change, pods=pods)
        if outcome.succeeded or outcome.stuck:
            return outcome
        successor = continuation(self.server, self.name, describes(self.run_id))
        if successor is None:
            return outcome
        following = replace(self, run_id=successor.run_id)
        on_resubmission(following)
        return following.wait(on_change, on_resubmission, notify)


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
    notify: Callable[[object], object] = lambda _: None,
) -> SubmittedRun:
    """Start a run on a Kubeflow server.

    The pipeline is uploaded if the server does not have this content yet. Credentials come from the
    environment (see `connect`); no secret is sent as a parameter.

    Args:
        source: a preset's name, the path of a YAML file, YAML text, or a RunConfig.
        overrides: "a.b=value" strings, or a mapping with the same content.
        pipeline: "retrain" looks for new data first, and ends early if there is none. "tune"
            searches for better settings first. "cross-validate" trains and scores on every fold.
            "automl" finds the best model of some data.
        host: the server's address (see `connect`).
        namespace: your namespace on a multi-user server.
        experiment: "" means the configuration's `tracking.experiment`.
        pipeline_root: where KFP keeps its artifacts; "" means the server's default.
        service_account: for the run's pods; "" means the server's default.
        notify: called with each warning about the pipeline or the cluster.

    Raises:
        BadInput: the configuration, the pipeline or the address cannot be used, or no node of the
            cluster that KUBECONFIG names can ever hold a training pod.
        ServerError: no connection, or the server refused; the message says which, with a fix.
    """
    submission = Submission.of(
        source,
        overrides,
        pipeline=pipeline,
        experiment=experiment,
        pipeline_root=pipeline_root,
        service_account=service_account,
    ).in_callers_trace()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "pipeline.yaml")
        compile_pipeline(path, notify, pipeline=pipeline, shape=submission.config.pipeline)
        server = connect(host, namespace)
        _check_pods(submission.config, server, notify)
        version = upload(server, path)
    return start(server, submission, version)


def _check_pods(config: RunConfig, server: Server, notify: Callable[[object], object]) -> None:
    """Compare the run's training pods with the nodes, if this machine may list them.

    Behind an address on this machine (a port-forward) or in the cluster, the server is in the
    cluster that KUBECONFIG names. Elsewhere it may be in another one, so it is only a warning.

    Raises:
        BadInput: no node can ever hold one.
    """
    try:
        problem = misfit(config.compute, connect_to_cluster())
    except (Unreachable, Refused):
        return
    if problem is None:
        return
    if urlsplit(server.host).hostname in _HERE or server.host == IN_CLUSTER:
        problem.raise_if_certain()
    notify(f"in the cluster that KUBECONFIG names, {problem}")


def start(server: Server, submission: Submission, version: Version) -> SubmittedRun:
    """Start a run of an uploaded version."""
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
    submission: Submission, notify: Callable[[Finding], object], *, pipeline: Pipeline
) -> list[str]:
    """Return lines on what `submit` would send. Sends nothing and contacts no server."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "pipeline.yaml")
        compile_pipeline(path, notify, pipeline=pipeline, shape=submission.config.pipeline)
        version, uploaded = version_name(path), path.stat().st_size
    others = {
        "pipeline root": submission.pipeline_root,
        "service account": submission.service_account,
    }
    return [
        f"pipeline    steadytrain-{pipeline}, version {version} ({size(uploaded)}), uploaded "
        "if the server does not have it",
        f"experiment  {submission.experiment}",
        f"run         {submission.config.run_id}",
        *(f"{name:11} {value}" for name, value in others.items() if value),
        "parameters  config =",
        *(f"  {line}" for line in submission.parameters["config"].splitlines()),
    ]

"""Compile a pipeline to YAML, and find in it what a server accepts and then breaks on.

Every rule is about something that compiles, runs with kfp.local, and fails on a cluster.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from steadytrain.components.shared.config.operations import PipelineConfig
from steadytrain.components.shared.config.secrets import find_secrets, names_a_secret
from steadytrain.components.shared.errors import BadInput, with_fix
from steadytrain.components.shared.quantities import duration
from steadytrain.components.shared.storage.local import local_errors, write_requested
from steadytrain.pipelines.pod_names import Pipeline

DEFAULT_RETRY_SECONDS = 3600
"""How long KFP retries a task that sets no other limit."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem that the pipeline would have on a server.

    location: the task, parameter or executor that has it.
    unsafe: whether a run would fail or expose a secret; otherwise it is a warning.
    """

    location: str
    message: str
    remedy: str
    unsafe: bool = True

    def __str__(self) -> str:
        kind = "unsafe" if self.unsafe else "warning"
        return with_fix(f"{kind}: {self.location}: {self.message}", self.remedy)


class UnsafePipeline(BadInput):
    """The pipeline would break on a server. Nothing was written or sent."""

    def __init__(self, findings: list[Finding]) -> None:
        self.findings = tuple(finding for finding in findings if finding.unsafe)
        lines = ["the pipeline would break on a server:", *map(str, self.findings)]
        super().__init__("\n".join(lines))


def lint(spec: Mapping[str, Any], platform: Mapping[str, Any] | None = None) -> list[Finding]:
    """Check a compiled pipeline.

    Args:
        spec: the pipeline spec, the first document of a compiled file.
        platform: the platform spec, the second document, if the file has one.
    """
    tasks = list(_tasks(spec, spec["root"], _Place(), platform or {}))
    findings = [*_parameters(spec), *_executors(spec)]
    for task in tasks:
        for rule in (_retry_window, _backoff_factor, _retry_in_loop, _cache, _constants):
            findings += rule(task)
        if task.container:
            findings += [*_image(task), *_limits(task)]
    return findings


def steps(spec: Mapping[str, Any]) -> list[str]:
    """Return the names of the tasks that run a container."""
    return [task.name for task in _tasks(spec, spec["root"], _Place(), {}) if task.container]


def read_pipeline(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the pipeline spec and the platform spec of a compiled file.

    Raises:
        BadInput: the file does not exist, or is not a compiled pipeline.
    """
    try:
        documents = [
            item for item in yaml.load_all(path.read_text("utf-8"), yaml.CSafeLoader) if item
        ]
    except FileNotFoundError as error:
        raise BadInput(f"{path}: no such file", remedy="give a compiled pipeline") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is not valid YAML", remedy="compile the pipeline again") from error
    spec = documents[0] if documents else None
    if not isinstance(spec, dict) or "root" not in spec or "pipelineInfo" not in spec:
        raise BadInput(
            f"{path} is not a compiled pipeline: it has no `pipelineInfo` and `root`",
            remedy="write one with `steadytrain compile` or KFP's compiler",
        )
    return spec, documents[1] if len(documents) > 1 else {}


@dataclass(frozen=True)
class _Place:
    path: tuple[str, ...] = ()
    in_loop: bool = False


@dataclass(frozen=True)
class _Task:
    """A task, with what the rules need to know about its position in the pipeline."""

    name: str
    location: str
    spec: Mapping[str, Any]
    in_loop: bool
    container: Mapping[str, Any] = field(default_factory=dict)
    timeout_seconds: float = 0

    @property
    def ours(self) -> bool:
        words = [*self.container.get("command", ()), *self.container.get("args", ())]
        return any("from steadytrain." in word for word in words)


def _tasks(
    spec: Mapping[str, Any], dag: Mapping[str, Any], at: _Place, platform: Mapping[str, Any]
) -> Iterator[_Task]:
    """Yield every task from the root down, so that tasks inside of a loop are known as such."""
    executors = spec.get("deploymentSpec", {}).get("executors", {})
    kubernetes = platform.get("platforms", {}).get("kubernetes", {})
    extra = kubernetes.get("deploymentSpec", {}).get("executors", {})
    for name, task in dag.get("dag", {}).get("tasks", {}).items():
        component = spec.get("components", {}).get(task["componentRef"]["name"], {})
        path = (*at.path, name)
        label = component.get("executorLabel", "")
        yield _Task(
            name=name,
            location=f"task {' > '.join(path)}",
            spec=task,
            in_loop=at.in_loop,
            container=executors.get(label, {}).get("container", {}),
            timeout_seconds=_seconds(extra.get(label, {}).get("activeDeadlineSeconds", 0)),
        )
        loops = "parameterIterator" in task or "artifactIterator" in task
        yield from _tasks(spec, component, _Place(path, at.in_loop or loops), platform)


def _retry_window(task: _Task) -> Iterator[Finding]:
    policy = task.spec.get("retryPolicy", {})
    retries = policy.get("maxRetryCount", 0)
    if not retries:
        return
    window = _seconds(policy.get("backoffMaxDuration", DEFAULT_RETRY_SECONDS))
    limit, counted = task.timeout_seconds, "Argo counts it from the start of the first attempt"
    if not limit:
        if window <= DEFAULT_RETRY_SECONDS:
            yield Finding(
                task.location,
                f"is retried only within {duration(window)}, and has no timeout: {counted}, so a "
                "later failure is never retried",
                "set_retry(backoff_max_duration=...) longer than the task can take, or a "
                "timeout (kfp.kubernetes.set_timeout)",
            )
    elif window < limit * retries:
        yield Finding(
            task.location,
            f"may take {duration(limit)}, and its window for {retries} retries is "
            f"{duration(window)}: {counted}, so the last one may never happen",
            f"set_retry(backoff_max_duration='{limit * (retries + 1):g}s') allows every retry",
            unsafe=window < limit,
        )


def _backoff_factor(task: _Task) -> Iterator[Finding]:
    factor = task.spec.get("retryPolicy", {}).get("backoffFactor", 2)
    if factor != int(factor):
        yield Finding(
            task.location,
            f"has the backoff factor {factor:g}, which Argo cannot read: it must be an integer",
            f"set_retry(backoff_factor={max(1, round(factor))})",
        )


def _retry_in_loop(task: _Task) -> Iterator[Finding]:
    if task.in_loop and task.spec.get("retryPolicy", {}).get("maxRetryCount", 0):
        yield Finding(
            task.location,
            "is retried only by kfp.local: a server ignores set_retry within a ParallelFor",
            "retry within the step, or move the task out of the loop",
        )


def _cache(task: _Task) -> Iterator[Finding]:
    if task.ours and task.spec.get("cachingOptions", {}).get("enableCache"):
        yield Finding(
            task.location,
            "has KFP's cache on, which does not see changes of the data behind an address and "
            "may return outputs that are gone; the step decides on reuse itself",
            "set_caching_options(False)",
        )


def _image(task: _Task) -> Iterator[Finding]:
    image = str(task.container.get("image", ""))
    if image.startswith("{{") or "@sha256:" in image:
        return
    tag = image.rpartition("/")[2].partition(":")[2]
    if tag in ("", "latest"):
        yield Finding(
            task.location,
            f"runs image {image!r}, {'without a tag' if not tag else 'tagged latest'}, so the "
            "code that runs can change at any time, and every pod pulls it again",
            "name a version or a digest (image@sha256:...)",
        )


def _limits(task: _Task) -> Iterator[Finding]:
    resources = task.container.get("resources", {})
    missing = [
        name
        for name, fields in {
            "CPU": ("resourceCpuLimit", "cpuLimit"),
            "memory": ("resourceMemoryLimit", "memoryLimit"),
        }.items()
        if not any(resources.get(key) for key in fields)
    ]
    if missing:
        setters = " and ".join(f"set_{name.lower()}_limit(...)" for name in missing)
        yield Finding(
            task.location,
            f"has no limit of {' and '.join(missing)}: it may use a whole node, is the first to "
            "be evicted, and a namespace with a quota rejects it",
            setters,
            unsafe=False,
        )


def _constants(task: _Task) -> Iterator[Finding]:
    inputs = task.spec.get("inputs", {}).get("parameters", {})
    given = {
        name: value["runtimeValue"]["constant"]
        for name, value in inputs.items()
        if "constant" in value.get("runtimeValue", {})
    }
    for problem in find_secrets(given):
        yield _secret(task.location, f"its input {problem.field}")


def _parameters(spec: Mapping[str, Any]) -> Iterator[Finding]:
    """Check the parameters of the form. Everyone who sees the run sees their values."""
    parameters = spec["root"].get("inputDefinitions", {}).get("parameters", {})
    for name, content in parameters.items():
        if names_a_secret(name) or any(find_secrets({name: content.get("defaultValue")})):
            yield _secret(f"parameter {name}", "it")


def _executors(spec: Mapping[str, Any]) -> Iterator[Finding]:
    executors = spec.get("deploymentSpec", {}).get("executors", {})
    for label, executor in executors.items():
        container = executor.get("container", {})
        given = {item["name"]: item.get("value") for item in container.get("env", ())}
        given |= {key: container[key] for key in ("command", "args") if key in container}
        for problem in find_secrets(given):
            yield _secret(f"executor {label}", problem.field)


def _secret(location: str, what: str) -> Finding:
    return Finding(
        location,
        f"{what} contains a secret, which everyone who can see the pipeline or one of "
        "its runs can read",
        "read it from a Kubernetes Secret (kfp.kubernetes.use_secret_as_env); if a real one "
        "was compiled in, revoke it",
    )


def _seconds(duration: object) -> float:
    """Parse a duration from protobuf's JSON: 60, "60" (a 64-bit integer) or "60s" (a duration)."""
    return float(str(duration).removesuffix("s"))


USUAL: Final = PipelineConfig()


def compile_pipeline(
    path: Path,
    notify: Callable[[Finding], object] = lambda _: None,
    *,
    pipeline: Pipeline = "finetune",
    shape: PipelineConfig = USUAL,
) -> Path:
    """Write the YAML of `pipeline_text` to a path, and return the path. Its folder is created.

    Raises:
        UnsafePipeline, StorageError: as for `pipeline_text`; nothing is written.
        BadInput: so too, or the file cannot be written.
    """
    text = pipeline_text(notify, pipeline=pipeline, shape=shape)
    write_requested(path, text.encode(), "--output")
    return path


def pipeline_text(
    notify: Callable[[Finding], object] = lambda _: None,
    *,
    pipeline: Pipeline = "finetune",
    shape: PipelineConfig = USUAL,
) -> str:
    """Compile a pipeline, and return its YAML. Every run returns identical text.

    Args:
        notify: called with each warning: something unwise on a server, although nothing breaks.
        pipeline: the main pipeline, the one that looks for new data first, the one that tunes,
            the one that cross-validates, or the one that searches for a model.
        shape: how it is split into pods, and what they reserve.

    Raises:
        UnsafePipeline: the pipeline would break on a server.
        BadInput: no folder for temporary files can be written.
        StorageError: there is no space for temporary files.
    """
    # Importing kfp takes 1.5 s, and it warns about a decorator's return types.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from kfp import compiler

        from steadytrain.pipelines.dags import pipeline_component

        dag = pipeline_component(pipeline, shape)

    with _temporary_folder() as folder:
        compiled = Path(folder, "pipeline.yaml")
        compiler.Compiler().compile(dag, str(compiled))
        for finding in checked(compiled):
            notify(finding)
        return compiled.read_text(encoding="utf-8")


@contextlib.contextmanager
def _temporary_folder() -> Iterator[str]:
    try:
        location = Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise BadInput(
            f"no folder for temporary files can be written: {error.strerror}",
            remedy="free space in one of them, or set TMPDIR to another",
        ) from error
    with local_errors("write", location), tempfile.TemporaryDirectory(dir=location) as folder:
        yield folder


def checked(path: Path) -> list[Finding]:
    """Return the warnings for a compiled file.

    Raises:
        BadInput: the file is not a compiled pipeline.
        UnsafePipeline: the pipeline would break on a server.
    """
    findings = lint(*read_pipeline(path))
    if any(finding.unsafe for finding in findings):
        raise UnsafePipeline(findings)
    return findings


_REGISTRIES: Final = re.compile(r"([a-z0-9-]+-docker\.pkg\.dev|([a-z]+\.)?gcr\.io)/")
"""Artifact Registry, and its names of Container Registry."""
_WITHOUT: Final = {
    "pvcMount": (
        "mounts a volume, which Vertex does not have: it has folders of Cloud Storage under /gcs",
        "set output to a folder of a bucket, such as /gcs/BUCKET/steadytrain",
    ),
    "secretAsEnv": (
        "reads a Kubernetes Secret, which Vertex does not have",
        "read Secret Manager in the image's entry point, or use the service account's own rights",
    ),
    "secretAsVolume": (
        "mounts a Kubernetes Secret, which Vertex does not have",
        "read Secret Manager in the image's entry point",
    ),
    "nodeSelector": (
        "selects nodes, of which Vertex has none",
        "set_accelerator_type and set_accelerator_limit select a machine there",
    ),
}
_HARMLESS: Final = {"podMetadata", "imagePullPolicy"}


def lint_vertex(spec: Mapping[str, Any], platform: Mapping[str, Any]) -> list[Finding]:
    """Return what of a compiled pipeline Vertex AI Pipelines rejects or ignores.

    The SDK of Vertex reads files with one YAML document (kubeflow/pipelines issue 11241), and
    Vertex runs the tasks on machines of its own, without a cluster's objects.

    Args:
        spec, platform: as of `read_pipeline`.
    """
    result = list(_images(spec))
    kubernetes = platform.get("platforms", {}).get("kubernetes", {})
    if not kubernetes:
        return result
    result.append(
        Finding(
            "the file",
            "has a second document, platforms.kubernetes, and Vertex's SDK reads files with one",
            "give it the first document only, after the findings below are resolved",
        )
    )
    executors = kubernetes.get("deploymentSpec", {}).get("executors", {})
    for label, fields in sorted(executors.items()):
        for name in sorted(fields.keys() - _HARMLESS):
            text, fix = _WITHOUT.get(
                name, (f"sets {name}, which Vertex ignores", "leave it out, or do not rely on it")
            )
            result.append(Finding(f"executor {label}", text, fix, unsafe=name in _WITHOUT))
    return result


def _images(spec: Mapping[str, Any]) -> Iterator[Finding]:
    executors = spec.get("deploymentSpec", {}).get("executors", {})
    images = {str(item.get("container", {}).get("image", "")) for item in executors.values()}
    for image in sorted(images - {""}):
        if not image.startswith("{{") and not _REGISTRIES.match(image):
            yield Finding(
                f"image {image}",
                "is not in Artifact Registry, from which Vertex pulls",
                "push it there, and set STEADYTRAIN_REGISTRY=REGION-docker.pkg.dev/PROJECT/NAME",
            )

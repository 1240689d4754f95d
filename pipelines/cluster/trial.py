"""Short-lived pods that test our image: whether it starts, its version, and what it can reach.

What ranks in several pods exchange is tested by a TrainJob of its own.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Final

from steadytrain.components.shared.cluster import NOT_YET
from steadytrain.components.shared.config import ComputeConfig, RecoveryConfig
from steadytrain.components.shared.quantities import duration
from steadytrain.components.shared.toolchain import REMEDY
from steadytrain.components.train.launch.collectives import judged
from steadytrain.components.train.launch.job import TRAIN_JOB, TrainJob
from steadytrain.components.train.launch.naming import run_labels
from steadytrain.components.train.launch.own_pod import OwnPod
from steadytrain.pipelines.cluster.access import (
    APPLY,
    SECONDS,
    Cluster,
    Line,
    failed,
    passed,
    reason,
    status_of,
    unchecked,
)
from steadytrain.pipelines.pod_names import NAME, TRACKING

ACCOUNT: Final = "steadytrain-trainer"
"""The service account that training runs under (manifests/base/accounts.yaml)."""

LABELS: Final = {
    "app.kubernetes.io/part-of": "steadytrain",
    "app.kubernetes.io/component": "doctor",
}
"""Labels of the trial pods. The network policies select by them."""

_POLL_SECONDS = 0.5
_HOPELESS = {
    "ErrImagePull",
    "ImagePullBackOff",
    "ErrImageNeverPull",
    "InvalidImageName",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
}


@dataclass(frozen=True)
class Trial:
    """One trial pod: what it runs, and how to read its result.

    judge: turns the pod's last phase (Succeeded or Failed) and its log into a line.
    """

    topic: str
    image: str
    command: Sequence[str]
    judge: Callable[[str, str], Line]


def try_image(cluster: Cluster, image: str, timeout_seconds: float, topic: str = "image") -> Line:
    """Run `steadytrain --version` in a pod, then delete the pod.

    Raises:
        kubernetes.client.ApiException: the API server does not answer.
    """
    trial = Trial(
        topic=topic,
        image=image,
        command=["steadytrain", "--version"],
        judge=lambda phase, log: _judge_version(phase, log, image, topic),
    )
    return _run(cluster, trial, timeout_seconds)


def try_compiler(cluster: Cluster, image: str, timeout_seconds: float) -> Line:
    """Check in a pod whether the training image can compile kernels.

    Raises:
        kubernetes.client.ApiException: the API server does not answer.
    """
    trial = Trial(
        topic="compiler",
        image=image,
        command=["python", "-m", "steadytrain.components.shared.toolchain"],
        judge=lambda phase, log: _judge_compiler(phase, log, image),
    )
    return _run(cluster, trial, timeout_seconds)


def try_tracking_in_pod(cluster: Cluster, image: str, timeout_seconds: float) -> Line:
    """Check the tracking server from a pod, with the address and credentials that steps get.

    The pod refers to the namespace's Secret, so you need no right to read the Secret.

    Raises:
        kubernetes.client.ApiException: the API server does not answer.
    """
    trial = Trial(
        topic="MLflow",
        image=image,
        command=["python", "-m", "steadytrain.pipelines.cluster.doctor"],
        judge=lambda phase, log: _judge_tracking(phase, log, cluster.namespace),
    )
    return _run(cluster, trial, timeout_seconds)


def _run(cluster: Cluster, trial: Trial, timeout_seconds: float) -> Line:
    from kubernetes import client

    core = client.CoreV1Api(cluster.api)
    try:
        made = core.create_namespaced_pod(cluster.namespace, _pod(trial), _request_timeout=SECONDS)
    except client.ApiException as error:
        return _not_made(trial.topic, error, cluster.namespace)
    name = made.metadata.name
    try:
        return _watch(core, name, cluster.namespace, trial, timeout_seconds)
    finally:
        with contextlib.suppress(client.ApiException):
            core.delete_namespaced_pod(
                name, cluster.namespace, grace_period_seconds=0, _request_timeout=SECONDS
            )


def _not_made(topic: str, error: Exception, namespace: str) -> Line:
    text = reason(error)
    if "exceeded quota" in text:
        return failed(topic, text, "stop what is not needed there, or have the quota raised")
    if "serviceaccount" in text and "not found" in text:
        return failed(topic, f"{namespace} has no account {ACCOUNT}", APPLY)
    if status_of(error) == 403 and "cannot create" in text:
        return unchecked(topic, text, "use an account that may create pods there")
    return failed(topic, f"a pod is rejected: {text}", "fix what the message names")


def _watch(core: Any, name: str, namespace: str, trial: Trial, timeout_seconds: float) -> Line:
    """Wait until the pod ends or cannot start. If it is late, report what the scheduler says."""
    topic, image = trial.topic, trial.image
    deadline = time.monotonic() + timeout_seconds
    while True:
        pod = core.read_namespaced_pod(name, namespace, _request_timeout=SECONDS)
        for why, message in _obstacles(pod):
            return failed(
                topic,
                f"{image}: {why}: {message}".strip(": "),
                "push the image to a registry that the nodes can reach (make images), name it "
                "with --image, and give the account its pull secret",
            )
        if pod.status.phase in ("Succeeded", "Failed"):
            # Don't let the client decode the log: it would parse JSON, and return the repr as text.
            log = core.read_namespaced_pod_log(
                name, namespace, _request_timeout=SECONDS, _preload_content=False
            )
            return trial.judge(pod.status.phase, log.data.decode(errors="replace"))
        if time.monotonic() > deadline:
            return failed(
                topic,
                f"{image}: the pod has not ended after {duration(timeout_seconds)}"
                f"{_unscheduled(pod)}",
                "check free capacity and taints with `kubectl describe nodes`; if the image is "
                "large and new to the nodes, run it again",
            )
        time.sleep(_POLL_SECONDS)


def _obstacles(pod: Any) -> Iterator[tuple[str, str]]:
    for status in pod.status.container_statuses or ():
        waiting = status.state.waiting
        if waiting and waiting.reason in _HOPELESS and not NOT_YET.search(waiting.message or ""):
            yield waiting.reason, waiting.message or ""


def _unscheduled(pod: Any) -> str:
    for condition in pod.status.conditions or ():
        if condition.type == "PodScheduled" and condition.status == "False":
            return f": {condition.message}"
    return ""


def _judge_compiler(phase: str, log: str, image: str) -> Line:
    printed = log.strip()
    if phase == "Failed":
        text = f"{image} does not say what it can compile: {_last_line(log)[:200]}"
        return failed("compiler", text, "rebuild the image (make images)")
    if printed:
        text = f"{image} lacks {printed}: kernels for GPUs and training.torch_compile are left out"
        return failed("compiler", text, REMEDY)
    return passed("compiler", f"{image} can compile kernels")


def _judge_version(phase: str, log: str, image: str, topic: str) -> Line:
    printed = _last_line(log)
    if phase == "Failed":
        return failed(
            topic,
            f"{image}: `steadytrain --version` failed: {printed[:200]}",
            "rebuild the image (make images)",
        )
    if printed != version("steadytrain"):
        return failed(
            topic,
            f"{image} has version {printed}, but this machine has {version('steadytrain')}",
            "install the same version on both sides",
        )
    return passed(topic, f"{image}, version {printed}")


def _judge_tracking(phase: str, log: str, namespace: str) -> Line:
    topic, printed = "MLflow", _last_line(log)
    if phase == "Failed":
        return failed(topic, f"the trial pod failed: {printed[:200]}", "fix the line `image` first")
    line = Line(**json.loads(printed))
    if line.state == "not asked":
        text = f"the Secret {NAME} of {namespace} has no MLFLOW_TRACKING_URI"
        return unchecked(topic, text, f"sh manifests/create-secret.sh {namespace}")
    return line


def _last_line(log: str) -> str:
    return log.strip().splitlines()[-1] if log.strip() else "nothing"


def _pod(trial: Trial) -> Any:
    from kubernetes import client

    container = client.V1Container(
        name="doctor",
        image=trial.image,
        image_pull_policy="IfNotPresent",
        command=[*trial.command],
        env=[_from_secret(key) for key in TRACKING],
        resources=client.V1ResourceRequirements(
            requests={"cpu": "100m", "memory": "128Mi"}, limits={"cpu": "1", "memory": "1Gi"}
        ),
        volume_mounts=[client.V1VolumeMount(name="tmp", mount_path="/tmp")],
        security_context=client.V1SecurityContext(
            allow_privilege_escalation=False,
            read_only_root_filesystem=True,
            capabilities=client.V1Capabilities(drop=["ALL"]),
        ),
    )
    return client.V1Pod(
        metadata=client.V1ObjectMeta(
            generate_name="steadytrain-doctor-",
            labels=dict(LABELS),
            annotations={"sidecar.istio.io/inject": "false"},
        ),
        spec=client.V1PodSpec(
            service_account_name=ACCOUNT,
            automount_service_account_token=False,
            restart_policy="Never",
            active_deadline_seconds=600,  # in case nothing is left to delete it
            security_context=client.V1PodSecurityContext(
                run_as_non_root=True,
                seccomp_profile=client.V1SeccompProfile(type="RuntimeDefault"),
            ),
            containers=[container],
            volumes=[
                client.V1Volume(
                    name="tmp", empty_dir=client.V1EmptyDirVolumeSource(size_limit="1Gi")
                )
            ],
        ),
    )


def _from_secret(key: str) -> Any:
    from kubernetes import client

    reference = client.V1SecretKeySelector(name=NAME, key=key, optional=True)
    return client.V1EnvVar(name=key, value_from=client.V1EnvVarSource(secret_key_ref=reference))


_TOPIC: Final = "collectives"
_MODULE: Final = "steadytrain.components.train.launch.collectives"
_JOB_POLL_SECONDS: Final = 1.0
# They hardly compute. On a node that is nearly full, a pod that asks for a core stays pending.
_PODS: Final = {"cpu": "100m", "memory": "2Gi", "shared_memory": "1Gi", "service_account": ACCOUNT}


def probe_job(
    compute: ComputeConfig | None, nodes: int, ranks: int, seconds: float, image: str
) -> TrainJob:
    """Return the job, whose pods have the labels of a run, so that network policies let them talk.

    Args:
        compute: of the run whose pods to imitate; None means small ones without GPUs.
        ranks: of each pod; 0 means those of `compute`, or one.
        seconds: the time limit of its ranks, which wait in it for pods that start late.
    """
    basis = compute or ComputeConfig.model_validate({"device": "cpu", "pods": _PODS})
    each = ranks or basis.nproc_per_node
    used = basis.model_copy(update={"nodes": nodes, "nproc_per_node": each})
    name = f"steadytrain-doctor-{secrets.token_hex(3)}"
    options = [f"--ranks={each}", f"--nodes={nodes}", f"--seconds={seconds:g}"]
    return TrainJob(
        name=name,
        folder="/nowhere",
        labels=run_labels(name),
        command=["python", "-m", _MODULE, *options],
        compute=used,
        recovery=RecoveryConfig(),
        own=OwnPod(image=image),
    )


def try_collectives(
    cluster: Cluster, job: TrainJob, seconds: float, pending_seconds: float
) -> Line:
    """Run the job, read what its ranks say, and delete it.

    Args:
        seconds: the time limit of the ranks, once all pods run.
        pending_seconds: how long the pods may take to start.

    Raises:
        kubernetes.client.ApiException: the API server does not answer.
    """
    from kubernetes import client

    custom, made = client.CustomObjectsApi(cluster.api), []
    try:
        for kind, manifest in job.manifests():
            custom.create_namespaced_custom_object(
                *(kind.group, kind.version, cluster.namespace, kind.plural, manifest),
                _request_timeout=SECONDS,
            )
            made.append(kind)
        return _watch_job(client.CoreV1Api(cluster.api), cluster, job, seconds, pending_seconds)
    except client.ApiException as error:
        if status_of(error) in (403, 404) and TRAIN_JOB not in made:
            fix = "install Kubeflow Trainer 2, and use an account that may create TrainJobs"
            return unchecked(_TOPIC, reason(error), fix)
        raise
    finally:
        for kind in reversed(made):
            with contextlib.suppress(client.ApiException):
                custom.delete_namespaced_custom_object(
                    *(kind.group, kind.version, cluster.namespace, kind.plural, job.name),
                    _request_timeout=SECONDS,
                )


def _watch_job(
    core: Any, cluster: Cluster, job: TrainJob, seconds: float, pending_seconds: float
) -> Line:
    """Wait until every pod has ended, and judge their output; or say which pod does not start."""
    selector = ",".join(f"{key}={value}" for key, value in job.labels.items())
    nodes, ranks = job.compute.nodes, job.compute.world_size
    deadline, all_run = time.monotonic() + pending_seconds, False
    while True:
        pods = core.list_namespaced_pod(
            cluster.namespace, label_selector=selector, _request_timeout=SECONDS
        ).items
        begun = [pod for pod in pods if pod.status.phase not in ("Pending", "Unknown")]
        ended = [pod for pod in begun if pod.status.phase in ("Succeeded", "Failed")]
        if not all_run and len(begun) >= nodes:
            deadline, all_run = time.monotonic() + seconds, True
        if len(ended) >= nodes or time.monotonic() > deadline:
            break
        time.sleep(_JOB_POLL_SECONDS)
    if len(begun) < nodes:
        waiting = [pod for pod in pods if pod not in begun]
        reason = next((text for pod in waiting if (text := _pending(pod))), "no message")
        return failed(
            _TOPIC,
            f"{len(begun)} of {nodes} pods have started within {duration(pending_seconds)}: "
            f"{reason}",
            "check free capacity with `kubectl describe nodes`, or give fewer --nodes",
        )
    lines = [line for pod in begun for line in _log(core, cluster.namespace, pod)]
    verdict = judged(lines, ranks, seconds)
    if verdict.good:
        return passed(_TOPIC, f"{nodes} pods, {verdict.text}")
    return failed(_TOPIC, f"{nodes} pods: {verdict.text}", verdict.remedy)


def _pending(pod: Any) -> str:
    for condition in pod.status.conditions or ():
        if condition.status == "False" and condition.message:
            return str(condition.message)
    return ""


def _log(core: Any, namespace: str, pod: Any) -> list[str]:
    # Without decoding by the client, which would parse JSON.
    answer = core.read_namespaced_pod_log(
        pod.metadata.name, namespace, _request_timeout=SECONDS, _preload_content=False
    )
    return list(answer.data.decode(errors="replace").splitlines())

"""A short pod of our image: can it be pulled, started, and is it this version?"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any, Final

from steadytrain.pipelines.cluster.access import SECONDS, Cluster, reason, status_of
from steadytrain.pipelines.cluster.line import APPLY, Line, failed, passed, unasked

ACCOUNT: Final = "steadytrain-trainer"
"""The account that training runs under (manifests/base/accounts.yaml)."""

TOPIC: Final = "image"
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


def try_image(cluster: Cluster, image: str, timeout_seconds: float) -> Line:
    """Runs `steadytrain --version` in a pod, and removes the pod.

    Raises:
        kubernetes.client.ApiException: the API server does not answer.
    """
    from kubernetes import client

    core = client.CoreV1Api(cluster.api)
    try:
        made = core.create_namespaced_pod(cluster.namespace, _pod(image), _request_timeout=SECONDS)
    except client.ApiException as error:
        return _not_made(error, cluster.namespace)
    name = made.metadata.name
    try:
        return _watch(core, name, cluster.namespace, image, timeout_seconds)
    finally:
        with contextlib.suppress(client.ApiException):
            core.delete_namespaced_pod(
                name, cluster.namespace, grace_period_seconds=0, _request_timeout=SECONDS
            )


def _not_made(error: Exception, namespace: str) -> Line:
    text = reason(error)
    if "exceeded quota" in text:
        return failed(TOPIC, text, "end what is not needed there, or have the quota raised")
    if "serviceaccount" in text and "not found" in text:
        return failed(TOPIC, f"{namespace} has no account {ACCOUNT}", APPLY)
    if status_of(error) == 403 and "cannot create" in text:
        return unasked(TOPIC, text, "ask as one who may create pods there")
    return failed(TOPIC, f"a pod is refused: {text}", "do what the message asks for")


def _watch(core: Any, name: str, namespace: str, image: str, timeout_seconds: float) -> Line:
    """Until the pod has ended, or cannot start; what the scheduler said of it, if it is late."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        pod = core.read_namespaced_pod(name, namespace, _request_timeout=SECONDS)
        for why, message in _obstacles(pod):
            return failed(
                TOPIC,
                f"{image}: {why}: {message}".strip(": "),
                "push the image to a registry that the nodes reach (make images), name it with "
                "--image, and give the account its pull secret",
            )
        if pod.status.phase in ("Succeeded", "Failed"):
            log = core.read_namespaced_pod_log(name, namespace, _request_timeout=SECONDS)
            return _judge(pod.status.phase, log, image)
        if time.monotonic() > deadline:
            return failed(
                TOPIC,
                f"{image}: the pod has not ended after {timeout_seconds:.0f} s{_unscheduled(pod)}",
                "see what `kubectl describe nodes` says of room and taints; where the image is "
                "large and new to the nodes, run it again",
            )
        time.sleep(_POLL_SECONDS)


def _obstacles(pod: Any) -> Iterator[tuple[str, str]]:
    for status in pod.status.container_statuses or ():
        waiting = status.state.waiting
        if waiting and waiting.reason in _HOPELESS:
            yield waiting.reason, waiting.message or ""


def _unscheduled(pod: Any) -> str:
    for condition in pod.status.conditions or ():
        if condition.type == "PodScheduled" and condition.status == "False":
            return f": {condition.message}"
    return ""


def _judge(phase: str, log: str, image: str) -> Line:
    told = log.strip().splitlines()[-1] if log.strip() else "nothing"
    if phase == "Failed":
        return failed(
            TOPIC,
            f"{image}: `steadytrain --version` failed: {told[:200]}",
            "build the image anew (make images)",
        )
    if told != version("steadytrain"):
        return failed(
            TOPIC,
            f"{image} has version {told}, here is {version('steadytrain')}",
            "install the same version on both sides",
        )
    return passed(TOPIC, f"{image}, version {told}")


def _pod(image: str) -> Any:
    from kubernetes import client

    container = client.V1Container(
        name="doctor",
        image=image,
        image_pull_policy="IfNotPresent",
        command=["steadytrain", "--version"],
        resources=client.V1ResourceRequirements(
            requests={"cpu": "100m", "memory": "128Mi"}, limits={"cpu": "1", "memory": "512Mi"}
        ),
        security_context=client.V1SecurityContext(
            allow_privilege_escalation=False,
            read_only_root_filesystem=True,
            capabilities=client.V1Capabilities(drop=["ALL"]),
        ),
    )
    return client.V1Pod(
        metadata=client.V1ObjectMeta(
            generate_name="steadytrain-doctor-",
            labels={"app.kubernetes.io/part-of": "steadytrain"},
            annotations={"sidecar.istio.io/inject": "false"},
        ),
        spec=client.V1PodSpec(
            service_account_name=ACCOUNT,
            automount_service_account_token=False,
            restart_policy="Never",
            active_deadline_seconds=600,  # should nobody be left to remove it
            security_context=client.V1PodSecurityContext(
                run_as_non_root=True,
                seccomp_profile=client.V1SeccompProfile(type="RuntimeDefault"),
            ),
            containers=[container],
        ),
    )

"""A namespace on a real cluster: restricted pods, a volume, and responses of services."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kubernetes import client
from kubernetes.stream import stream

from steadytrain.components.shared.cluster import NOT_YET
from steadytrain.pipelines.pod_names import MOUNT_PATH, NAME

USER = 1000
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}
STUCK = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError")
KEEPER = "keeper"
"""The pod through which a test reads the volume."""


@dataclass(frozen=True)
class Cluster:
    """One namespace, with a claim and a service account, both named NAME."""

    namespace: str

    @property
    def core(self) -> client.CoreV1Api:
        return client.CoreV1Api()

    def run(self, name: str, container: Mapping[str, Any], seconds: float = 600, **pod: Any) -> str:
        """Run a pod to completion and delete it; return its log.

        Raises:
            PodFailed: the pod did not exit with 0; contains the end of its log.
        """
        self.start(name, container, **pod)
        try:
            phase = self.wait(name, ("Succeeded", "Failed"), seconds)
            log = str(self.core.read_namespaced_pod_log(name, self.namespace))
            ended = self._ended(name)
        finally:
            self.core.delete_namespaced_pod(name, self.namespace, grace_period_seconds=0)
        if phase == "Failed":
            # KFP's executor prints its whole input first, and a long output is cut in the middle.
            end = "\n".join(log.splitlines()[-40:])
            raise PodFailed(f"pod {name} failed: {ended}\n{end}")
        return log

    def start(
        self,
        name: str,
        container: Mapping[str, Any],
        *,
        volumes: Sequence[Mapping[str, Any]] = (),
        mounts: Sequence[Mapping[str, Any]] = (),
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """Start a pod as restricted as administrators require: not root, only /tmp writable."""
        filled = {
            "name": "main",
            "imagePullPolicy": "IfNotPresent",
            "securityContext": RESTRICTED,
            "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, *mounts],
            **container,
        }
        spec = {
            "restartPolicy": "Never",
            "serviceAccountName": NAME,
            "securityContext": {
                "runAsNonRoot": True,
                "fsGroup": USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "volumes": [{"name": "tmp", "emptyDir": {}}, *volumes],
            "containers": [filled],
            "terminationGracePeriodSeconds": 5,
        }
        metadata = {"name": name, "labels": dict(labels or {})}
        self.core.create_namespaced_pod(self.namespace, {"metadata": metadata, "spec": spec})

    def wait(self, name: str, phases: Sequence[str], seconds: float) -> str:
        """Wait until a pod is in one of the phases.

        Raises:
            PodFailed: the pod can't start or takes too long.
        """
        deadline = time.monotonic() + seconds
        while True:
            status = self.core.read_namespaced_pod(name, self.namespace).status
            if status.phase in phases:
                return str(status.phase)
            for container in status.container_statuses or ():
                waiting = container.state.waiting
                if (
                    waiting
                    and waiting.reason in STUCK
                    and not NOT_YET.search(waiting.message or "")
                ):
                    raise PodFailed(f"pod {name} cannot start: {waiting.reason} {waiting.message}")
            if time.monotonic() > deadline:
                raise PodFailed(
                    f"pod {name} is {status.phase} after {seconds:.0f} s:\n{self._events(name)}"
                )
            time.sleep(0.5)

    def _ended(self, pod: str) -> str:
        """Return why a pod ended, such as an eviction, and its container's exit code."""
        status = self.core.read_namespaced_pod(pod, self.namespace).status
        found = [status.reason, status.message]
        for container in status.container_statuses or ():
            if container.state.terminated:
                found += [container.state.terminated.reason, container.state.terminated.exit_code]
        return ", ".join(str(item) for item in found if item is not None)

    def _events(self, pod: str) -> str:
        """Return what the cluster reported about a pod and its nodes, such as a full disk."""
        about_pod = self.core.list_namespaced_event(
            self.namespace, field_selector=f"involvedObject.name={pod}"
        ).items
        about_nodes = self.core.list_event_for_all_namespaces(
            field_selector="involvedObject.kind=Node,type=Warning"
        ).items
        return "\n".join(f"{item.reason}: {item.message}" for item in [*about_pod, *about_nodes])

    def wait_until_ready(self, name: str, seconds: float) -> None:
        """Wait until a running pod passes its probe."""
        self.wait(name, ["Running"], seconds)
        deadline = time.monotonic() + seconds
        while True:
            (container,) = self.core.read_namespaced_pod(
                name, self.namespace
            ).status.container_statuses
            if container.ready:
                return
            if time.monotonic() > deadline or container.restart_count:
                raise PodFailed(f"pod {name} is not ready after {seconds:.0f} s")
            time.sleep(0.5)

    def read(self, path: str) -> str:
        """Return the content of a file on the volume."""
        return self.shell("cat", path)

    def shell(self, *command: str) -> str:
        """Return the output of a command in the keeper pod."""
        running = stream(
            self.core.connect_get_namespaced_pod_exec,
            KEEPER,
            self.namespace,
            command=list(command),
            stdout=True,
            stderr=True,
            stdin=False,
            tty=False,
            _preload_content=False,  # otherwise JSON comes back as the repr of a Python object
        )
        running.run_forever(timeout=60)
        printed, complaint = running.read_stdout(timeout=1), running.read_stderr(timeout=1)
        assert running.returncode == 0, f"{' '.join(command)}: {complaint}"
        return str(printed)

    def ask(self, service: str, path: str) -> Any:
        """Return the JSON response of a service to a GET, sent through the API server."""
        place = f"/api/v1/namespaces/{self.namespace}/services/{service}/proxy/{path}"
        answer, *_ = client.ApiClient().call_api(
            place, "GET", response_type="str", auth_settings=["BearerToken"], _preload_content=False
        )
        return json.loads(answer.data)


class PodFailed(AssertionError):
    """A test pod did not do what it should."""


def volume() -> dict[str, Any]:
    return {"name": "volume", "persistentVolumeClaim": {"claimName": NAME}}


def volume_mount() -> dict[str, Any]:
    return {"name": "volume", "mountPath": MOUNT_PATH}

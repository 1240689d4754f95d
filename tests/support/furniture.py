"""What a run's pods need in their namespace: an account, a volume, a tracking server."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from steadytrain.pipelines.pod_names import NAME

from support.cluster import KEEPER, Cluster, volume, volume_mount
from support.shared_volume import shared_volume

_PORT = 5000


@contextlib.contextmanager
def furnished(cluster: Cluster, image: str) -> Iterator[Cluster]:
    """Yield the cluster with a service account, the shared volume, and a pod to read it."""
    account = {"metadata": {"name": NAME}}
    cluster.core.create_namespaced_service_account(cluster.namespace, account)
    with shared_volume(cluster, image):
        cluster.start(
            KEEPER,
            {"image": image, "command": ["sleep", "infinity"]},
            volumes=[volume()],
            mounts=[volume_mount()],
        )
        cluster.wait(KEEPER, ["Running"], 300)
        yield cluster


def serve_mlflow(
    cluster: Cluster, image: str, secret: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Start a tracking server and put its address in the Secret NAME; return "service:port".

    Args:
        secret: additional entries for the Secret.
    """
    name = "mlflow"
    command = ["mlflow", "server", "--host", "0.0.0.0", "--port", str(_PORT), "--workers", "1"]
    command += ["--allowed-hosts", "*", "--backend-store-uri", "sqlite:////tmp/mlflow.db"]
    command += ["--serve-artifacts", "--artifacts-destination", "/tmp/artifacts"]
    probe = {"httpGet": {"path": "/health", "port": _PORT}, "periodSeconds": 1}
    container = {
        "image": image,
        "command": command,
        # Otherwise it starts seven processes for jobs that nobody sends.
        "env": [{"name": "MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "value": "false"}],
        "startupProbe": {**probe, "failureThreshold": 300},
        # Without resource requests, the pods of a run would starve it.
        "resources": {"requests": {"cpu": "500m", "memory": "512Mi"}},
    }
    cluster.start(name, container, labels={"app": name})
    service = {"selector": {"app": name}, "ports": [{"port": _PORT}]}
    core, namespace = cluster.core, cluster.namespace
    core.create_namespaced_service(namespace, {"metadata": {"name": name}, "spec": service})
    data = {"MLFLOW_TRACKING_URI": f"http://{name}.{namespace}:{_PORT}", **secret}
    core.create_namespaced_secret(namespace, {"metadata": {"name": NAME}, "stringData": data})
    cluster.wait_until_ready(name, 300)
    # The first query is slow, because it creates the tables.
    cluster.ask(f"{name}:{_PORT}", "api/2.0/mlflow/experiments/search?max_results=1")
    return f"{name}:{_PORT}"


@contextlib.contextmanager
def away(cluster: Cluster, service: str, told: str, seconds: float) -> Iterator[None]:
    """Let nothing answer behind a service, as while its Deployment restarts.

    Args:
        told: a shell command in the keeper, which succeeds once somebody has noticed.
        seconds: how long the service stays away after that.
    """
    namespace, over = cluster.namespace, threading.Event()

    def select(pods: str) -> None:
        body = {"spec": {"selector": {"app": pods}}}
        cluster.core.patch_namespaced_service(service, namespace, body)

    def come_back() -> None:
        # A process of its own, since the client streams in one thread only.
        command = ["kubectl", "exec", KEEPER, "-n", namespace, "--", "sh", "-c", told]
        while not over.is_set() and subprocess.run(command, capture_output=True).returncode:
            time.sleep(1)
        over.wait(seconds)
        select(service)

    select("nobody")
    thread = threading.Thread(target=come_back)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()

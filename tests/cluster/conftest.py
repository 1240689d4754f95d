"""A namespace for the session, on the cluster of KUBECONFIG, with all that a run's pods need.

The images must be on the nodes (`make images`, then for example `kind load docker-image`).
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from kubernetes import client, config

from steadytrain.components.shared.attached import NAME
from steadytrain.components.shared.image import STEP_IMAGE

from support.cluster import KEEPER, Cluster, volume, volume_mount
from support.namespaces import TEST_IMAGE
from support.shared_volume import shared_volume

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session")
def step_image():
    return STEP_IMAGE


@pytest.fixture(scope="session")
def train_image():
    return TEST_IMAGE


@pytest.fixture(scope="session")
def api():
    """The cluster that KUBECONFIG names."""
    if not os.environ.get("KUBECONFIG"):
        pytest.skip("needs a cluster: KUBECONFIG is not set")
    config.load_kube_config()
    return client.CoreV1Api()


@pytest.fixture(scope="session")
def namespace(api):
    name = f"steadytrain-test-{uuid.uuid4().hex[:6]}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    api.create_namespace({"metadata": {"name": name, "labels": labels}})
    yield name
    api.delete_namespace(name)
    _until_gone(api, name)


@pytest.fixture(scope="session")
def cluster(api, namespace, step_image) -> Iterator[Cluster]:
    """The namespace with a service account, the shared volume, and a pod to read it through."""
    made = Cluster(namespace)
    api.create_namespaced_service_account(namespace, {"metadata": {"name": NAME}})
    with shared_volume(made, step_image):
        made.start(
            KEEPER,
            {"image": step_image, "command": ["sleep", "infinity"]},
            volumes=[volume()],
            mounts=[volume_mount()],
        )
        made.wait(KEEPER, ["Running"], 300)
        yield made


@pytest.fixture(scope="session")
def mlflow(cluster, train_image) -> str:
    """Name of the service of a tracking server, of which the Secret NAME tells the steps."""
    name, port = "mlflow", 5000
    command = ["mlflow", "server", "--host", "0.0.0.0", "--port", str(port), "--workers", "1"]
    command += ["--allowed-hosts", "*", "--backend-store-uri", "sqlite:////tmp/mlflow.db"]
    command += ["--serve-artifacts", "--artifacts-destination", "/tmp/artifacts"]
    probe = {"httpGet": {"path": "/health", "port": port}, "periodSeconds": 1}
    container = {
        "image": train_image,
        "command": command,
        # Seven processes otherwise, for jobs that nobody sends.
        "env": [{"name": "MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "value": "false"}],
        "startupProbe": {**probe, "failureThreshold": 300},
        # Without a request it would starve beside the pods of a run.
        "resources": {"requests": {"cpu": "500m", "memory": "512Mi"}},
    }
    cluster.start(name, container, labels={"app": name})
    service = {"selector": {"app": name}, "ports": [{"port": port}]}
    core, namespace = cluster.core, cluster.namespace
    core.create_namespaced_service(namespace, {"metadata": {"name": name}, "spec": service})
    data = {"MLFLOW_TRACKING_URI": f"http://{name}.{namespace}:{port}"}
    core.create_namespaced_secret(namespace, {"metadata": {"name": NAME}, "stringData": data})
    cluster.wait_until_ready(name, 300)
    # The first question is slow: it makes the tables.
    cluster.ask(f"{name}:{port}", "api/2.0/mlflow/experiments/search?max_results=1")
    return f"{name}:{port}"


def _until_gone(api: client.CoreV1Api, namespace: str, seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while api.list_namespace(field_selector=f"metadata.name={namespace}").items:
        assert time.monotonic() < deadline, f"{namespace} is still there after {seconds:.0f} s"
        time.sleep(1)

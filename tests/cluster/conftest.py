"""A session-wide namespace on the KUBECONFIG cluster, with everything that a run's pods need.

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

from steadytrain.components.shared.environment import STEP_IMAGE

from support.cluster import Cluster
from support.furniture import furnished, serve_mlflow
from support.launched import Launched
from support.namespaces import TEST_IMAGE

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
    """Connect to the cluster in KUBECONFIG."""
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
    """Yield the namespace with a service account, the shared volume, and a pod to read it."""
    with furnished(Cluster(namespace), step_image) as made:
        yield made


@pytest.fixture(scope="session")
def mlflow(cluster, train_image) -> str:
    """Start a tracking server whose address is in the Secret NAME; return "service:port"."""
    return serve_mlflow(cluster, train_image)


@pytest.fixture(scope="session")
def launched(cluster, train_image) -> Launched:
    """Return the runs of the train step in the namespace, with their data prepared."""
    made = Launched(cluster, train_image)
    made.prepare()
    return made


def _until_gone(api: client.CoreV1Api, namespace: str, seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while api.list_namespace(field_selector=f"metadata.name={namespace}").items:
        assert time.monotonic() < deadline, f"{namespace} is still there after {seconds:.0f} s"
        time.sleep(1)

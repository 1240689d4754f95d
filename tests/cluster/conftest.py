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
from kubernetes.client import ApiException

from steadytrain.components.shared.attached import NAME
from steadytrain.components.shared.image import STEP_IMAGE, TRAIN_IMAGE

from support.cluster import KEEPER, Cluster, volume, volume_mount
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
    """Another tag of it may be named, to try what is not built as the version's image yet."""
    return os.environ.get("STEADYTRAIN_TEST_TRAIN_IMAGE", TRAIN_IMAGE)


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


def _until_gone(api: client.CoreV1Api, namespace: str, seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            api.read_namespace(namespace)
        except ApiException as error:
            assert error.status == 404
            return
        time.sleep(1)
    raise AssertionError(f"namespace {namespace} is still there after {seconds:.0f} s")

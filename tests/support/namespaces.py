"""A test's own namespace on a real cluster, with restricted Pod Security."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client, config

from steadytrain.components.shared.cluster import Cluster
from steadytrain.components.shared.environment import TRAIN_IMAGE

from support.manifests import OF_THE_CLUSTER
from support.shared_volume import FOLDER, default_class, on_node

TEST_IMAGE = os.environ.get("STEADYTRAIN_TEST_TRAIN_IMAGE", TRAIN_IMAGE)
"""The training image, which must be on the nodes. Set another tag to test an unreleased image."""

needs_cluster = pytest.mark.skipif(
    not os.environ.get("KUBECONFIG"), reason="needs a cluster, named by KUBECONFIG"
)


def kubectl(*arguments: str | Path, content: str = "", check: bool = True) -> str:
    """Run kubectl and return its output."""
    done = subprocess.run(["kubectl", *arguments], input=content, capture_output=True, text=True)
    assert not check or done.returncode == 0, done.stderr
    return done.stdout


@contextlib.contextmanager
def own_namespace(name: str) -> Iterator[str]:
    """Create a namespace and delete it afterwards, with everything in it."""
    namespace = f"steadytrain-{name}-{secrets.token_hex(3)}"
    kubectl("create", "namespace", namespace)
    kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    try:
        yield namespace
    finally:
        kubectl("delete", "namespace", namespace, "--wait=false")
        for kind in OF_THE_CLUSTER:
            kubectl("delete", kind, _of_the_cluster(namespace), "--ignore-not-found")


@contextlib.contextmanager
def volumes_for(claims: Sequence[Any], namespace: str) -> Iterator[None]:
    """Create a volume for each claim in a folder of the single node.

    Few storage classes support volumes that several pods share.
    """
    config.load_kube_config()
    volumes = [_volume(claim, namespace) for claim in claims]
    folders = " ".join(item["spec"]["hostPath"]["path"] for item in volumes)
    on_node(f"mkdir -m 0777 {folders}", namespace, TEST_IMAGE)
    apply(volumes)
    try:
        yield
    finally:
        kubectl("delete", "pv", *(item["metadata"]["name"] for item in volumes), "--wait=false")
        on_node(f"rm -r {folders}", namespace, TEST_IMAGE)


def in_namespace(objects: Sequence[Any], namespace: str) -> list[Any]:
    """Return objects of the overlay `standalone`, moved to another namespace."""
    text = yaml.safe_dump_all(objects).replace("namespace: kubeflow", f"namespace: {namespace}")
    moved = list(yaml.safe_load_all(text))
    for item in moved:
        if item["kind"] in OF_THE_CLUSTER:
            item["metadata"]["name"] = _of_the_cluster(namespace)
        if item["kind"] == "ValidatingAdmissionPolicyBinding":
            item["spec"]["policyName"] = _of_the_cluster(namespace)
            selector = item["spec"]["matchResources"]["namespaceSelector"]
            selector["matchLabels"] = {"kubernetes.io/metadata.name": namespace}
    return moved


def _of_the_cluster(namespace: str) -> str:
    """Return the name for cluster-wide objects that belong to this namespace."""
    return f"launcher-{namespace}"


def apply(objects: Sequence[Any]) -> None:
    kubectl("apply", "-f", "-", content=yaml.safe_dump_all(objects))


def _volume(claim: Any, namespace: str) -> Any:
    name = f"{namespace}-{claim['metadata']['name']}"
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "accessModes": claim["spec"]["accessModes"],
            "capacity": claim["spec"]["resources"]["requests"],
            "claimRef": {"namespace": namespace, "name": claim["metadata"]["name"]},
            "hostPath": {"path": f"{FOLDER}/{name}"},
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": default_class(),
        },
    }


def as_account(name: str, namespace: str) -> Cluster:
    """Return a connection to the cluster as a service account, with a token of its own."""
    settings = client.Configuration()
    config.load_kube_config(client_configuration=settings)
    # Remove every credential of the KUBECONFIG user.
    settings.cert_file = settings.key_file = settings.refresh_api_key_hook = None
    token = kubectl("create", "token", name, "-n", namespace).strip()
    settings.api_key = {"authorization": f"Bearer {token}"}
    return Cluster(client.ApiClient(settings), namespace)

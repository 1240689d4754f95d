"""The volume of a test's namespace: from the storage class, or a folder of the node."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from kubernetes import client

from steadytrain.pipelines.pod_names import NAME

from support.cluster import Cluster

SIZE = "5Gi"
FOLDER = "/var/tmp"
_DEFAULT = "storageclass.kubernetes.io/is-default-class"


@contextlib.contextmanager
def shared_volume(cluster: Cluster, image: str) -> Iterator[None]:
    """Create a bound claim NAME; without a storage class, the cluster must have a single node."""
    api, name = client.CoreV1Api(), cluster.namespace
    claim: dict[str, Any] = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": SIZE}},
    }
    no_class = not default_class()
    if no_class:
        claim |= {"storageClassName": "", "volumeName": name}
        on_node(f"mkdir -m 0777 {FOLDER}/{name}", name, image)
        api.create_persistent_volume(
            {
                "metadata": {"name": name},
                "spec": {
                    "capacity": {"storage": SIZE},
                    "accessModes": ["ReadWriteOnce"],
                    "persistentVolumeReclaimPolicy": "Retain",
                    "hostPath": {"path": f"{FOLDER}/{name}"},
                },
            }
        )
    api.create_namespaced_persistent_volume_claim(name, {"metadata": {"name": NAME}, "spec": claim})
    try:
        yield
    finally:
        if no_class:
            api.delete_persistent_volume(name)
            on_node(f"rm -r {FOLDER}/{name}", name, image)


def default_class() -> str:
    """Return the name of the default storage class, or "" if the cluster has none."""
    classes = client.StorageV1Api().list_storage_class().items
    default = (
        item for item in classes if (item.metadata.annotations or {}).get(_DEFAULT) == "true"
    )
    return next((str(item.metadata.name) for item in default), "")


def on_node(command: str, name: str, image: str) -> None:
    """Run a command as root, which the test's own namespace doesn't allow."""
    api, home = client.CoreV1Api(), Cluster("default")
    spec = {
        "restartPolicy": "Never",
        "securityContext": {"runAsUser": 0},
        "volumes": [{"name": "folder", "hostPath": {"path": FOLDER}}],
        "containers": [
            {
                "name": "main",
                "image": image,
                "command": ["sh", "-c", command],
                "volumeMounts": [{"name": "folder", "mountPath": FOLDER}],
            }
        ],
    }
    api.create_namespaced_pod("default", {"metadata": {"name": name}, "spec": spec})
    try:
        assert home.wait(name, ("Succeeded", "Failed"), 120) == "Succeeded", command
    finally:
        api.delete_namespaced_pod(name, "default", grace_period_seconds=0)

"""A namespace of a real cluster for a test's own, with restricted Pod Security."""

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
from kubernetes import config

from steadytrain.components.shared.image import TRAIN_IMAGE

from support.shared_volume import FOLDER, default_class, on_node

TEST_IMAGE = os.environ.get("STEADYTRAIN_TEST_TRAIN_IMAGE", TRAIN_IMAGE)
"""Of training; must be on the nodes. Another tag may be named, to try what has no version yet."""

needs_cluster = pytest.mark.skipif(
    not os.environ.get("KUBECONFIG"), reason="needs a cluster, named by KUBECONFIG"
)


def kubectl(*arguments: str | Path, content: str = "", check: bool = True) -> str:
    """What kubectl prints."""
    done = subprocess.run(["kubectl", *arguments], input=content, capture_output=True, text=True)
    assert not check or done.returncode == 0, done.stderr
    return done.stdout


@contextlib.contextmanager
def own_namespace(name: str) -> Iterator[str]:
    """A namespace that is gone afterwards, with all in it."""
    namespace = f"steadytrain-{name}-{secrets.token_hex(3)}"
    kubectl("create", "namespace", namespace)
    kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    try:
        yield namespace
    finally:
        kubectl("delete", "namespace", namespace, "--wait=false")


@contextlib.contextmanager
def volumes_for(claims: Sequence[Any], namespace: str) -> Iterator[None]:
    """A volume for each claim, in a folder of the one node: few storage classes can share any."""
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
    """Objects of the overlay `standalone`, moved to another namespace."""
    text = yaml.safe_dump_all(objects).replace("namespace: kubeflow", f"namespace: {namespace}")
    return list(yaml.safe_load_all(text))


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

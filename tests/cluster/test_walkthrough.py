"""The commands of the walk-through on a cluster, read from the README and run as printed there.

The namespace has its printed name, so this needs a cluster without Kubeflow. A small server in a
pod stands in for Kubeflow Pipelines.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from support import kfp_server
from support.manifests import OF_THE_CLUSTER, build
from support.namespaces import apply, kubectl, needs_cluster, volumes_for
from support.snippets import README, ROOT, blocks

NAMESPACE, PORT = "kubeflow", 3000
GUIDE, SCHEDULES = (ROOT / "docs" / "guides" / f"{name}.md" for name in ("cluster", "schedules"))
APART = ("make images",)
"""Printed commands that are left out: the nodes have the images already."""

pytestmark = needs_cluster


def block(page, language, within):
    """Return the only block of a page that has a text within it."""
    (found,) = [item.text for item in blocks(language) if item.page == page and within in item.text]
    return found


@pytest.fixture
def kubeflow(step_image, tmp_path_factory):
    """Yield the namespace of a standalone Kubeflow Pipelines, with its account and its UI."""
    if kubectl("get", "namespace", NAMESPACE, "--ignore-not-found", "-o", "name"):
        pytest.skip(f"the cluster has a namespace {NAMESPACE}")
    kubectl("create", "namespace", NAMESPACE)
    objects = build("standalone", (), tmp_path_factory.mktemp("built"))
    claims = [item for item in objects if item["kind"] == "PersistentVolumeClaim"]
    try:
        kubectl("create", "serviceaccount", "pipeline-runner", "-n", NAMESPACE)
        apply(stand_in(step_image))
        kubectl("wait", "--for=condition=Ready", "pod/ui", "-n", NAMESPACE, "--timeout=120s")
        with volumes_for(claims, NAMESPACE):
            yield
    finally:
        kubectl("delete", "namespace", NAMESPACE, "--wait=false")
        for item in objects:
            if item["kind"] in OF_THE_CLUSTER:
                kubectl("delete", item["kind"], item["metadata"]["name"], "--ignore-not-found")


def stand_in(image):
    """Return a pod that answers as Kubeflow Pipelines does, and its service."""
    code = inspect.getsource(kfp_server) + (
        f"\nwith serving(Kfp(script=[[('run', 'SUCCEEDED')]]), port={PORT}):\n"
        "    threading.Event().wait()\n"
    )
    connect = f"import socket; socket.create_connection(('127.0.0.1', {PORT}))"
    probe = {"exec": {"command": ["python", "-c", connect]}}
    container = {
        "name": "ui",
        "image": image,
        "command": ["python", "-c", code],
        "readinessProbe": {**probe, "periodSeconds": 2, "timeoutSeconds": 20},
    }
    metadata = {"namespace": NAMESPACE, "labels": {"app": "ui"}}
    ports = [{"port": 80, "targetPort": PORT}]
    return [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "ui", **metadata},
            "spec": {"containers": [container]},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "ml-pipeline-ui", **metadata},
            "spec": {"selector": {"app": "ui"}, "ports": ports},
        },
    ]


def test_printed_commands_work_one_after_the_other(kubeflow, tmp_path):
    small = "compute: {pods: {cpu: 500m, memory: 1Gi}}\n"  # so that any node can hold the pods
    (tmp_path / "my.yaml").write_text(block(README, "yaml", "name: support-bot") + small)
    (tmp_path / "schedules.yaml").write_text(block(SCHEDULES, "yaml", "\nschedules:"))
    (tmp_path / "manifests").symlink_to(ROOT / "manifests")
    printed = block(README, "bash", "doctor --cluster").splitlines()
    commands = [line for line in printed if not line.startswith(APART)]
    of_the_guide = [
        line for item in blocks("bash") if item.page == GUIDE for line in item.text.splitlines()
    ]
    assert set(commands) <= set(of_the_guide)
    (schedules,) = (line for line in of_the_guide if "schedule apply" in line)
    status, told = shell([*commands, schedules], tmp_path)
    assert status == 0, told
    assert "rollout: steadytrain-mlflow is available" in told
    assert "created a run, logged to it, read it and deleted it" in told
    assert "http://127.0.0.1:8080/#/runs/details/" in told


def shell(commands: Iterable[str], folder: Path) -> tuple[int, str]:
    """Run commands as a terminal does, and end what they leave in the background.

    Returns:
        The exit status of the first that fails, and what all of them printed.
    """
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    told = folder / "told"
    with (
        told.open("w") as out,
        subprocess.Popen(
            ["bash", "-c", "\n".join(["set -ex", *commands])],
            cwd=folder,
            env={**os.environ, "PATH": path},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as running,
    ):
        status = running.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGTERM)
    return status, told.read_text()

"""The manifests applied for real, where Pod Security is enforced at its level `restricted`."""

from __future__ import annotations

import pytest
import yaml

from support.manifests import build
from support.namespaces import (
    TEST_IMAGE,
    apply,
    in_namespace,
    kubectl,
    needs_cluster,
    own_namespace,
    volumes_for,
)

pytestmark = [needs_cluster, pytest.mark.cluster]

SERVER = "http://steadytrain-mlflow:5000"
LOG_A_RUN = """
import mlflow
mlflow.set_experiment("probe")
with mlflow.start_run() as run:
    mlflow.log_metric("loss", 1.5)
    mlflow.log_text("kept", "note.txt")
client = mlflow.MlflowClient()
kept = mlflow.artifacts.load_text(f"runs:/{run.info.run_id}/note.txt")
print("came back:", client.get_run(run.info.run_id).data.metrics["loss"], kept)
"""


@pytest.fixture(scope="module")
def applied(tmp_path_factory):
    """The overlay `standalone` in a namespace of its own; gives the namespace."""
    folder = tmp_path_factory.mktemp("applied")
    name, _, tag = TEST_IMAGE.rpartition(":")
    images = [{"name": "steadytrain/train", "newName": name, "newTag": tag}]
    with own_namespace("manifests") as namespace:
        kubectl("create", "serviceaccount", "pipeline-runner", "-n", namespace)
        objects = in_namespace(build("standalone", (), folder, images=images), namespace)
        claims = [item for item in objects if item["kind"] == "PersistentVolumeClaim"]
        with volumes_for(claims, namespace, folder / "volumes"):
            apply(objects)
            yield namespace


def test_the_tracking_server_becomes_ready(applied):
    rollout = ("rollout", "status", "deployment/steadytrain-mlflow", "--timeout=240s")
    kubectl(*rollout, "-n", applied)
    claims = yaml.safe_load(kubectl("get", "pvc", "-n", applied, "-o", "yaml"))["items"]
    assert {item["status"]["phase"] for item in claims} == {"Bound"}


def test_a_pod_of_the_namespace_logs_a_run_and_reads_it_back_after_a_restart(applied):
    """By the service's name, through its check of names; what it keeps is on its volume."""
    kubectl("rollout", "status", "deployment/steadytrain-mlflow", "--timeout=240s", "-n", applied)
    assert "came back: 1.5 kept" in in_a_pod(applied, "logs", LOG_A_RUN)
    kubectl("delete", "pod", "-l", "app.kubernetes.io/name=steadytrain-mlflow", "-n", applied)
    kubectl("rollout", "status", "deployment/steadytrain-mlflow", "--timeout=240s", "-n", applied)
    found = in_a_pod(
        applied,
        "looks",
        "import mlflow; print(mlflow.search_runs(experiment_names=['probe'])['metrics.loss'][0])",
    )
    assert found.strip().endswith("1.5")


def test_another_name_for_the_server_is_refused(applied):
    kubectl("rollout", "status", "deployment/steadytrain-mlflow", "--timeout=240s", "-n", applied)
    code = (
        "import urllib.request, urllib.error\n"
        f"request = urllib.request.Request('{SERVER}/api/2.0/mlflow/experiments/search')\n"
        "request.add_header('Host', 'attacker.test')\n"
        "try:\n    urllib.request.urlopen(request)\n"
        "except urllib.error.HTTPError as error:\n    print('refused:', error.code)"
    )
    assert "refused: 403" in in_a_pod(applied, "asks", code)


def test_a_second_apply_changes_nothing(applied, tmp_path):
    before = generations(applied)
    name, _, tag = TEST_IMAGE.rpartition(":")
    images = [{"name": "steadytrain/train", "newName": name, "newTag": tag}]
    apply(in_namespace(build("standalone", (), tmp_path, images=images), applied))
    assert generations(applied) == before


def generations(namespace):
    kinds = "deployment,networkpolicy,role,rolebinding,pvc,serviceaccount"
    items = yaml.safe_load(kubectl("get", kinds, "-n", namespace, "-o", "yaml"))["items"]
    names = {(item["kind"], item["metadata"]["name"]): item["metadata"] for item in items}
    return {
        name: metadata["resourceVersion"]
        for name, metadata in names.items()
        if name[0] != "Deployment"
    } | {
        name: metadata["generation"] for name, metadata in names.items() if name[0] == "Deployment"
    }


def in_a_pod(namespace, name, code):
    """What a program prints in a pod of training's account, as restricted as ours are."""
    container = {
        "name": "main",
        "image": TEST_IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-c", code],
        "env": [{"name": "MLFLOW_TRACKING_URI", "value": SERVER}],
        "resources": {"limits": {"cpu": "1", "memory": "1Gi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    spec = {
        "serviceAccountName": "steadytrain-trainer",
        "restartPolicy": "Never",
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": namespace}}
    apply([{**pod, "spec": spec}])
    ended = "--for=jsonpath={.status.containerStatuses[0].state.terminated}"
    kubectl("wait", ended, f"pod/{name}", "-n", namespace, "--timeout=180s")
    return kubectl("logs", name, "-n", namespace)

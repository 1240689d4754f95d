"""The manifests applied to a real cluster, with Pod Security enforced at the `restricted` level."""

from __future__ import annotations

import contextlib
import subprocess
import time

import pytest
import yaml

from steadytrain.pipelines.pod_names import NAME, STEP_LABELS

from support.manifests import COMPONENTS, MANIFESTS, OVERLAYS, build
from support.namespaces import (
    TEST_IMAGE,
    apply,
    in_namespace,
    kubectl,
    needs_cluster,
    own_namespace,
    volumes_for,
)
from support.s3 import client_of, make_bucket, moto_server

pytestmark = needs_cluster

SERVER = "http://steadytrain-mlflow:5000"
TRACKING = [
    {"name": key, "valueFrom": {"secretKeyRef": {"name": NAME, "key": key}}}
    for key in ("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
]
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


# Only components whose kinds exist in the test cluster.
BUILT_IN = [name for name in COMPONENTS if name not in ("api-access", "kueue")]


def images():
    name, _, tag = TEST_IMAGE.rpartition(":")
    return [{"name": "steadytrain/train", "newName": name, "newTag": tag}]


@contextlib.contextmanager
def stack(name, folder, *components):
    """Yield a namespace of its own for the overlay `standalone`, and the objects to apply there."""
    with own_namespace(name) as namespace:
        kubectl("create", "serviceaccount", "pipeline-runner", "-n", namespace)
        built = build("standalone", components, folder, images=images())
        objects = in_namespace(built, namespace)
        claims = [item for item in objects if item["kind"] == "PersistentVolumeClaim"]
        with volumes_for(claims, namespace):
            yield namespace, objects


@pytest.fixture(scope="module")
def applied(tmp_path_factory):
    with stack("manifests", tmp_path_factory.mktemp("applied")) as (namespace, objects):
        apply(objects)
        _until_it_waits_for_the_secret(namespace)
        create_secret(namespace)
        yield namespace


def _until_it_waits_for_the_secret(namespace):
    """The server must not start without the Secret, not even with a password of its own."""
    waiting = "{.items[0].status.containerStatuses[0].state.waiting.reason}"
    which = ("-l", "app.kubernetes.io/name=steadytrain-mlflow", "-n", namespace)
    deadline = time.monotonic() + 60
    while kubectl("get", "pods", *which, "-o", f"jsonpath={waiting}", check=False) != (
        "CreateContainerConfigError"
    ):
        assert time.monotonic() < deadline
        time.sleep(0.5)


def create_secret(namespace, file=None):
    """Create the Secret as the README says. A second call must fail and change nothing."""
    command = ["sh", MANIFESTS / "create-secret.sh", namespace, *([file] if file else [])]
    subprocess.run(command, check=True, capture_output=True)
    before = kubectl("get", "secret", NAME, "-n", namespace, "-o", "yaml")
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode != 0
    assert "already exists" in again.stderr
    assert kubectl("get", "secret", NAME, "-n", namespace, "-o", "yaml") == before


@pytest.fixture(scope="module")
def empty():
    with own_namespace("stacks") as namespace:
        yield namespace


def test_tracking_server_becomes_ready(applied):
    rollout = ("rollout", "status", "deployment/steadytrain-mlflow", "--timeout=240s")
    kubectl(*rollout, "-n", applied)
    claims = yaml.safe_load(kubectl("get", "pvc", "-n", applied, "-o", "yaml"))["items"]
    assert {item["status"]["phase"] for item in claims} == {"Bound"}


def test_logged_run_is_read_back_after_a_server_restart(applied):
    """Use the service name, which passes the host check; the data survive on the volume."""
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


def test_pod_without_the_password_is_rejected(applied):
    kubectl("rollout", "status", "deployment/steadytrain-mlflow", "--timeout=240s", "-n", applied)
    code = (
        "import urllib.request, urllib.error\n"
        "try:\n"
        f"    urllib.request.urlopen('{SERVER}/api/2.0/mlflow/experiments/search?max_results=1')\n"
        "except urllib.error.HTTPError as error:\n    print('refused:', error.code)"
    )
    assert "refused: 401" in in_a_pod(applied, "stranger", code, env=())


def test_another_name_for_the_server_is_rejected(applied):
    kubectl("rollout", "status", "deployment/steadytrain-mlflow", "--timeout=240s", "-n", applied)
    code = (
        "import urllib.request, urllib.error\n"
        f"request = urllib.request.Request('{SERVER}/api/2.0/mlflow/experiments/search')\n"
        "request.add_header('Host', 'attacker.test')\n"
        "try:\n    urllib.request.urlopen(request)\n"
        "except urllib.error.HTTPError as error:\n    print('refused:', error.code)"
    )
    assert "refused: 403" in in_a_pod(applied, "asks", code)


def test_second_apply_changes_nothing(applied, tmp_path):
    before = generations(applied)
    apply(in_namespace(build("standalone", (), tmp_path, images=images()), applied))
    assert generations(applied) == before


@pytest.mark.parametrize(
    ("overlay", "components"),
    [*((overlay, ()) for overlay in OVERLAYS), *(("standalone", (one,)) for one in BUILT_IN)],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_api_server_accepts_every_stack(empty, tmp_path, overlay, components):
    served = kubectl("api-versions").split()
    objects = build(overlay, components, tmp_path)
    known = [item for item in objects if item["apiVersion"] in served]
    text = yaml.safe_dump_all(known)
    for namespace in ("kubeflow", "my-profile"):
        text = text.replace(f"namespace: {namespace}", f"namespace: {empty}")
    taken = kubectl("apply", "--dry-run=server", "-f", "-", content=text)
    assert len(taken.splitlines()) == len(known)
    if unknown := {item["apiVersion"] for item in objects} - set(served):
        pytest.skip(f"the cluster does not serve {', '.join(sorted(unknown))}")


def test_with_keys_in_a_secret_artifacts_go_to_s3(tmp_path):
    with moto_server("0.0.0.0") as port, stack("s3", tmp_path, "s3-secret") as (namespace, objects):
        make_bucket(port, "my-bucket")
        node = kubectl("get", "nodes", "-o", "jsonpath={.items[0].status.addresses[0].address}")
        told = {
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://{node}:{port}",
        }
        file = tmp_path / "s3.env"
        file.write_text("".join(f"{key}={value}\n" for key, value in told.items()))
        create_secret(namespace, file)
        apply(objects)
        rollout = ("rollout", "status", "deployment/steadytrain-mlflow", "--timeout=240s")
        kubectl(*rollout, "-n", namespace)
        assert "came back: 1.5 kept" in in_a_pod(namespace, "logs", LOG_A_RUN)
        (note,) = client_of(port).list_objects_v2(Bucket="my-bucket", Prefix="mlflow/")["Contents"]
        assert note["Key"].endswith("/note.txt")


def generations(namespace):
    kinds = "deployment,networkpolicy,role,rolebinding,pvc,serviceaccount"
    items = yaml.safe_load(kubectl("get", kinds, "-n", namespace, "-o", "yaml"))["items"]
    names = {(item["kind"], item["metadata"]["name"]): item["metadata"] for item in items}
    # A Deployment's resourceVersion changes with its pods' status, so use its generation.
    return {
        name: metadata["generation" if name[0] == "Deployment" else "resourceVersion"]
        for name, metadata in names.items()
    }


def in_a_pod(namespace, name, code, env=TRACKING):
    """Return what a program prints in a pod of the training account, as restricted as ours."""
    container = {
        "name": "main",
        "image": TEST_IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-c", code],
        "env": [*env, {"name": "HOME", "value": "/tmp"}],
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
    metadata = {"name": name, "namespace": namespace, "labels": STEP_LABELS}
    apply([{"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}])
    ended = "--for=jsonpath={.status.containerStatuses[0].state.terminated}"
    kubectl("wait", ended, f"pod/{name}", "-n", namespace, "--timeout=180s")
    return kubectl("logs", name, "-n", namespace)

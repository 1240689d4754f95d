"""`steadytrain doctor --cluster` in a healthy namespace and in broken ones."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import yaml

from steadytrain.pipelines.pod_names import NAME

from support.launched import CONFIG
from support.manifests import MANIFESTS, build
from support.namespaces import (
    TEST_IMAGE,
    apply,
    in_namespace,
    kubectl,
    needs_cluster,
    own_namespace,
    volumes_for,
)

pytestmark = needs_cluster

ACCOUNT, TRIAL = "pipeline-runner", "app.kubernetes.io/component=doctor"


def images():
    name, _, tag = TEST_IMAGE.rpartition(":")
    return [{"name": "steadytrain/train", "newName": name, "newTag": tag}]


def doctor(namespace, *options):
    command = [sys.executable, "-m", "steadytrain.pipelines.cli", "doctor", "--cluster", "--json"]
    done = subprocess.run(
        [*command, "--namespace", namespace, *options], capture_output=True, text=True
    )
    lines = {line["topic"]: line for line in json.loads(done.stdout)["checks"]}
    assert done.returncode == any(line["state"] == "fail" for line in lines.values())
    for line in lines.values():
        assert bool(line["remedy"]) == (line["state"] != "pass")
    return lines


def apply_without_mlflow(namespace, scratch):
    """Apply the manifests without the tracking server, which has its own test."""
    objects = in_namespace(build("standalone", (), scratch), namespace)
    kept = [item for item in objects if item["kind"] not in ("Deployment", "Service")]
    apply(kept)
    return kept


@pytest.fixture(scope="module")
def ready(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ready")
    with own_namespace("ready") as namespace:
        kubectl("create", "serviceaccount", ACCOUNT, "-n", namespace)
        objects = apply_without_mlflow(namespace, folder)
        claims = [item for item in objects if item["kind"] == "PersistentVolumeClaim"]
        with volumes_for(claims, namespace):
            bound = "--for=jsonpath={.status.phase}=Bound"
            kubectl("wait", bound, "pvc", "--all", "-n", namespace, "--timeout=60s")
            yield namespace


@pytest.fixture
def empty():
    with own_namespace("empty") as namespace:
        yield namespace


def test_every_check_passes_on_a_healthy_cluster_and_no_pod_stays(ready):
    probe = ("--nodes", "2", "--probe-seconds", "300")
    lines = doctor(ready, "--service-account", ACCOUNT, "--image", TEST_IMAGE, *probe)
    rights = [line for topic, line in lines.items() if topic.startswith("may ")]
    assert rights
    assert {line["state"] for line in rights} == {"pass"}
    for topic in ("cluster", "TrainJob", "JobSet", "Workflow", "runtime", "GPUs", "quota"):
        assert lines[topic]["state"] == "pass", lines[topic]
    assert lines["volume"]["state"] == "pass", lines["volume"]
    assert "ReadWriteMany" in lines["volume"]["text"]
    for topic in ("image", "step image", "compiler"):
        assert lines[topic]["state"] == "pass", lines[topic]
    assert lines["collectives"]["state"] == "pass", lines["collectives"]
    assert not kubectl("get", "pods,trainjobs", "-n", ready, "-o", "name")
    assert lines["S3"]["state"] == lines["MLflow"]["state"] == "not asked"
    assert "no MLFLOW_TRACKING_URI" in lines["MLflow"]["text"]
    assert lines["MLflow"]["remedy"] == f"sh manifests/create-secret.sh {ready}"


def test_mlflow_is_checked_from_a_pod_with_the_secret(tmp_path):
    """The server's address works only from pods."""
    with own_namespace("tracking") as namespace:
        objects = in_namespace(build("standalone", (), tmp_path, images=images()), namespace)
        claims = [item for item in objects if item["kind"] == "PersistentVolumeClaim"]
        with volumes_for(claims, namespace):
            apply(objects)
            command = ["sh", MANIFESTS / "create-secret.sh", namespace]
            subprocess.run(command, check=True, capture_output=True)
            lines = doctor(namespace, "--image", TEST_IMAGE)
            assert lines["rollout"]["text"] == "steadytrain-mlflow is available"
            line = lines["MLflow"]
            assert (line["state"], line["text"]) == (
                "pass",
                "http://steadytrain-mlflow:5000: created a run, logged to it, read it "
                "and deleted it",
            )
            wrong = '{"stringData": {"MLFLOW_TRACKING_PASSWORD": "not-the-one-it-knows"}}'
            kubectl("patch", "secret", NAME, "-n", namespace, "-p", wrong)
            line = doctor(namespace, "--image", TEST_IMAGE)["MLflow"]
            assert line["state"] == "fail"
            assert "http://steadytrain-mlflow:5000" in line["text"]
            assert "not-the-one-it-knows" not in str(line)
            assert not kubectl("get", "pods", "-l", TRIAL, "-n", namespace, "-o", "name")


def test_image_that_cannot_be_pulled_is_reported_at_once_and_leaves_no_pod(ready):
    wrong = "none.test/none:0"
    lines = doctor(ready, "--image", wrong, "--step-image", wrong)
    for line in (lines["image"], lines["step image"]):
        assert line["state"] == "fail"
        assert "ErrImagePull" in line["text"] or "ImagePullBackOff" in line["text"]
    left = kubectl("get", "pods", "-n", ready, "-o", "jsonpath={.items[*].metadata.name}")
    assert "doctor" not in left


def test_pods_that_no_node_can_hold_are_reported(empty, tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text(yaml.safe_dump({**CONFIG, "compute": {"pods": {"memory": "200Ti"}}}))
    line = doctor(empty, file)["pods"]
    assert line["state"] == "fail"
    assert "memory 200Ti, which none of the" in line["text"]


def test_account_without_rights_is_reported_with_missing_verbs(empty):
    lines = doctor(empty, "--service-account", ACCOUNT)
    denied = [line for topic, line in lines.items() if topic.startswith("may ")]
    assert {line["state"] for line in denied} == {"fail"}
    assert (
        f"{ACCOUNT} may not create, get, list, patch, delete trainjobs"
        in lines["may trainjobs"]["text"]
    )
    assert "RoleBinding" in lines["may trainjobs"]["remedy"]


def test_missing_volume_and_account_are_both_reported(empty):
    lines = doctor(empty)
    assert lines["volume"]["state"] == lines["image"]["state"] == "fail"
    assert "no claim steadytrain" in lines["volume"]["text"]
    assert "no account steadytrain-trainer" in lines["image"]["text"]


def test_unbound_claim_is_reported(empty, tmp_path):
    apply_without_mlflow(empty, tmp_path)
    line = doctor(empty, "--image", "none.test/none:0")["volume"]
    assert line["state"] == "fail"
    assert "not bound" in line["text"]


def test_exhausted_quota_is_reported_with_what_it_lacks(empty, tmp_path):
    apply_without_mlflow(empty, tmp_path)
    kubectl("create", "quota", "tight", "--hard=pods=0,requests.cpu=4", "-n", empty)
    lines = doctor(empty)
    assert lines["quota"]["state"] == lines["image"]["state"] == "fail"
    assert "tight has no pods left" in lines["quota"]["text"]
    assert "exceeded quota" in lines["image"]["text"]


def test_missing_namespace_is_reported_once():
    lines = doctor("steadytrain-nowhere")
    assert lines["cluster"]["state"] == "fail"
    assert lines["all checks within the cluster"]["state"] == "not asked"

"""`doctor --cluster` waits for the Deployments of the manifests, and says what still starts."""

from __future__ import annotations

import threading

import pytest

from steadytrain.pipelines.cluster import doctor
from steadytrain.pipelines.cluster.access import open_cluster

from support.kubernetes_server import kubernetes_server

DEPLOYMENTS = "/apis/apps/v1/namespaces/ours/deployments"
MLFLOW = f"{DEPLOYMENTS}/steadytrain-mlflow"
PODS = "/api/v1/namespaces/ours/pods"
TEMPLATE = {"metadata": {}, "spec": {"containers": [{"name": "mlflow"}]}}


@pytest.fixture
def answers(monkeypatch, tmp_path):
    with kubernetes_server() as answers:
        monkeypatch.setenv("KUBECONFIG", str(answers.kubeconfig(tmp_path / "config")))
        monkeypatch.setattr(doctor, "_POLL_SECONDS", 0.01)
        yield answers


def deployment(*, available=0, generation=1, seen=1, part_of="steadytrain"):
    labels = {"app.kubernetes.io/part-of": part_of}
    return {
        "metadata": {"name": "steadytrain-mlflow", "generation": generation, "labels": labels},
        "spec": {"replicas": 1, "selector": {"matchLabels": {"app": "m"}}, "template": TEMPLATE},
        "status": {
            "observedGeneration": seen,
            "updatedReplicas": available,
            "availableReplicas": available,
        },
    }


def starting(answers, **state):
    item = deployment(**state)
    answers.listing(DEPLOYMENTS, item)
    answers.of[MLFLOW] = item


def pod(**status):
    return {"metadata": {"name": "m-1"}, "status": {"phase": "Pending", **status}}


def waiting(reason, message):
    state = {"waiting": {"reason": reason, "message": message}}
    return pod(containerStatuses=[{"name": "mlflow", "image": "a:1", "state": state}])


def lines(seconds=0.05):
    return list(doctor.wait_for_rollouts(open_cluster("ours"), seconds))


def test_server_that_starts_in_time_passes(answers):
    starting(answers)
    answers.listing(PODS)
    threading.Timer(0.3, lambda: starting(answers, available=1)).start()
    (line,) = lines(300)
    assert (line.state, line.text) == ("pass", "steadytrain-mlflow is available")


def test_what_still_starts_is_named_with_the_reason(answers):
    starting(answers)
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    answers.listing(PODS, pod(conditions=[{**condition, "message": "0/1 nodes: no memory"}]))
    (line,) = lines()
    assert line.state == "fail"
    assert "steadytrain-mlflow is still starting after" in line.text
    assert "0/1 nodes: no memory" in line.text


def test_new_version_that_the_controller_has_not_seen_is_not_available(answers):
    starting(answers, available=1, generation=2)
    answers.listing(PODS)
    (line,) = lines()
    assert "still starting" in line.text


def test_server_that_can_never_start_ends_the_wait(answers):
    starting(answers)
    answers.listing(PODS, waiting("InvalidImageName", "cannot parse image"))
    (line,) = lines(600)
    assert line.state == "fail"
    assert "steadytrain-mlflow cannot start" in line.text
    assert "cannot parse image" in line.text


def test_deployments_of_others_are_not_waited_for(answers):
    starting(answers, part_of="another")
    assert lines() == []


def test_missing_right_to_list_deployments_is_reported(answers):
    answers.of[DEPLOYMENTS] = 403
    (line,) = lines()
    assert line.state == "not asked"

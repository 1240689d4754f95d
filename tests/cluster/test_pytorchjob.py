"""The TrainJob tests in pods of PyTorchJobs, on a cluster with the Training Operator."""

from __future__ import annotations

import pytest
from kubernetes import client

from steadytrain.components.shared.cluster import Cluster as Client
from steadytrain.components.shared.events.types import CheckpointSaved, TrainingStep
from steadytrain.components.train.launch.job import PYTORCH_JOB
from steadytrain.pipelines.cluster.doctor import PYTORCHJOB_RIGHTS

from support.cluster import Cluster
from support.furniture import furnished
from support.launched import STEPS, Launched
from support.namespaces import own_namespace

KINDS = {"pytorchjobs": ("kubeflow.org", "v1")}


@pytest.fixture(scope="module")
def launched(api, step_image, train_image):
    if not Client(client.ApiClient(), "default").offers(PYTORCH_JOB):
        pytest.skip("the cluster has no PyTorchJob")
    with (
        own_namespace("pytorchjob") as namespace,
        furnished(Cluster(namespace), step_image) as here,
    ):
        made = Launched(here, train_image, PYTORCHJOB_RIGHTS, KINDS)
        made.prepare()
        yield made


def start(launched, run, pod="", faults="", pods=None, **changes):
    compute = {"launcher": "pytorchjob", "pods": pods or {}}
    return launched.start(run, pod=pod, faults=faults, compute=compute, **changes)


@pytest.fixture(scope="module")
def undisturbed(launched):
    phase, log = launched.end(start(launched, "undisturbed"), 900)
    assert phase == "Succeeded", log
    return log


def test_two_nodes_train_under_the_service_account_and_leave_nothing(launched, undisturbed):
    assert launched.record("undisturbed")["attempts"] == 1
    assert len(launched.losses("undisturbed")) == STEPS
    assert launched.left("undisturbed") == []


def test_lost_pod_and_lost_launcher_cost_no_step(launched, undisturbed):
    run = "disturbed"
    start(launched, run, pod="first")
    launched.until(run, CheckpointSaved, lambda event: event.attempt == 1)
    pod = launched.pods(run, attempt=1)[1]
    launched.cluster.core.delete_namespaced_pod(pod.metadata.name, pod.metadata.namespace)
    launched.until(run, TrainingStep, lambda event: event.attempt == 2)
    launched.kill("first")
    phase, log = launched.end(start(launched, run, pod="second"), 900)
    assert phase == "Succeeded", log
    deleted, _, last = launched.ended(run)
    assert deleted.failure_class == "preemption"
    assert "was deleted" in deleted.message
    assert last.outcome == "finished"
    weights = [launched.record(name)["weights_digest"] for name in ("undisturbed", run)]
    assert weights[0] == weights[1]
    assert launched.left(run) == []


def test_oom_halves_the_micro_batch_in_the_next_pytorchjob(launched, undisturbed):
    pod = start(launched, "short", faults="forward:1", data={"task": "support.faults:RunsOut"})
    phase, log = launched.end(pod)
    assert phase == "Succeeded", log
    assert launched.classes("short") == ["gpu_oom", ""]
    losses = launched.losses("undisturbed")
    assert launched.losses("short") == pytest.approx(losses, rel=1e-6)


def test_operators_reason_is_reported_if_there_are_no_pods(launched):
    hard = {"requests.nvidia.com/gpu": "0"}
    body = {"metadata": {"name": "no-gpus"}, "spec": {"hard": hard}}
    launched.cluster.core.create_namespaced_resource_quota(launched.cluster.namespace, body)
    pods = {"gpus": 1, "pending_timeout_seconds": 30}
    pod = start(launched, "quota", pods=pods, recovery={"max_failures_per_class": 1})
    phase, log = launched.end(pod)
    assert phase == "Failed", log
    assert launched.classes("quota") == ["pending_timeout"]
    assert "exceeded quota: no-gpus" in log, log
    assert launched.left("quota") == []

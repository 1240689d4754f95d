"""Classify failures by the state of the pods.

The captured pods come from a real cluster (Kubernetes 1.34, Trainer 2.0). The others follow the
API's documentation, because a single-node cluster cannot produce them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from steadytrain.components.train.failures import classify
from steadytrain.components.train.launch.evidence import (
    hopeless,
    is_waiting,
    lost,
    node_of,
    refused,
    same_wait,
    unreachable,
    why_absent,
    why_pending,
)

CAPTURED = json.loads(Path(__file__).with_name("captured_pods.json").read_text())


def failure_class(evidence):
    return classify([evidence], {}, {}).failure_class


def pod(*, terminated=None, **status):
    containers = [{"image": "train:1", "state": {"terminated": terminated}}] if terminated else []
    return {
        "metadata": {"name": "run-a1-node-0-0-abcde"},
        "spec": {"containers": [{"resources": {}}]},
        "status": {"containerStatuses": containers, **status},
    }


def disrupted(reason):
    condition = {"type": "DisruptionTarget", "status": "True", "reason": reason}
    return [{**condition, "message": f"because of {reason}"}]


KILLED = {"exitCode": 137, "reason": "Error", "finishedAt": "2026-01-01T00:00:00Z"}
LOST = [
    ("preemption", CAPTURED["deleted"], "was deleted"),
    ("host_oom", CAPTURED["oom_killed"], "compute.pods.memory"),
    ("unknown", CAPTURED["failed"], "exit status 1"),
    ("preemption", pod(phase="Failed", conditions=disrupted("PreemptionByScheduler")), "Preempt"),
    ("preemption", pod(phase="Failed", conditions=disrupted("DeletionByTaintManager")), "Taint"),
    ("preemption", pod(phase="Failed", conditions=disrupted("EvictionByEvictionAPI")), "Evict"),
    ("node_lost", pod(phase="Failed", conditions=disrupted("DeletionByPodGC")), "PodGC"),
    (
        "preemption",
        pod(
            phase="Failed",
            reason="Evicted",
            message="The node was low on resource: memory.",
            conditions=disrupted("TerminationByKubelet"),
            terminated=KILLED,
        ),
        "low on resource: memory",
    ),
    (
        "host_oom",
        pod(
            phase="Failed",
            reason="Evicted",
            message='Usage of EmptyDir volume "steadytrain-shared-memory" exceeds the limit "1Mi"',
        ),
        "shared-memory",
    ),
    (
        "storage",
        pod(
            phase="Failed",
            reason="Evicted",
            message='Usage of EmptyDir volume "steadytrain-tmp" exceeds the limit "50Gi". ',
            conditions=disrupted("TerminationByKubelet"),
            terminated=KILLED,
        ),
        "compute.pods.temporary_storage",
    ),
    (
        "storage",
        pod(
            phase="Failed",
            reason="Evicted",
            message="Pod ephemeral local storage usage exceeds the total limit of containers 50Gi.",
        ),
        "compute.pods.temporary_storage",
    ),
    (
        "storage",
        pod(
            phase="Failed",
            reason="Evicted",
            message='Container node exceeded its local ephemeral storage limit "50Gi".',
        ),
        "compute.pods.temporary_storage",
    ),
    (
        "preemption",
        pod(
            phase="Failed",
            reason="Evicted",
            message="The node was low on resource: ephemeral-storage. Threshold quantity: 1, "
            "available: 0.",
        ),
        "low on resource",
    ),
    (
        "preemption",
        pod(phase="Failed", reason="Terminated", message="imminent node shutdown"),
        "node shutdown",
    ),
    ("node_lost", pod(reason="NodeLost", message="Node x was unresponsive"), "unresponsive"),
    ("node_lost", pod(phase="Failed", terminated=KILLED), "exit status 137"),
    ("crash", pod(phase="Failed", terminated=KILLED | {"exitCode": 139}), "exit status 139"),
    ("node_lost", pod(phase="Failed", reason="UnexpectedAdmissionError"), "UnexpectedAdmission"),
    (
        "user_bug",
        pod(
            phase="Failed",
            terminated={
                "exitCode": 128,
                "reason": "StartError",
                "message": 'exec: "python": executable file not found in $PATH',
            },
        ),
        "executable file not found",
    ),
    (
        "network",
        pod(
            phase="Failed",
            terminated={"exitCode": 1, "reason": "Error", "message": "Connection refused"},
        ),
        "Connection refused",
    ),
]


@pytest.mark.parametrize(("expected", "told", "words"), LOST)
def test_lost_pod_has_a_reason(expected, told, words):
    evidence = lost(told)
    assert evidence is not None
    assert failure_class(evidence) == expected
    assert words in evidence.message + evidence.remedy
    assert told["metadata"]["name"] in evidence.message


@pytest.mark.parametrize("name", ["running", "creating", "unschedulable", "image_denied"])
def test_pod_that_runs_or_waits_is_not_lost(name):
    assert lost(CAPTURED[name]) is None


def test_succeeded_pod_being_deleted_is_not_lost():
    assert "deletionTimestamp" in CAPTURED["completed"]["metadata"]
    assert lost(CAPTURED["completed"]) is None


def test_loss_time_is_the_end_time():
    evidence = lost(pod(phase="Failed", terminated=KILLED))
    assert evidence is not None
    assert evidence.time == 1_767_225_600


def test_denied_image_is_reported_at_once():
    evidence = hopeless(CAPTURED["image_denied"])
    assert evidence is not None
    assert failure_class(evidence) == "user_bug"
    assert "compute.pods.image" in evidence.remedy


def test_unresponsive_registry_is_no_wrong_image():
    assert hopeless(CAPTURED["image_unreachable"]) is None
    evidence = unreachable(CAPTURED["image_unreachable"])
    assert evidence is not None
    assert failure_class(evidence) == "pending_timeout"
    assert "no such host" in evidence.message


@pytest.mark.parametrize(
    "reason", ["InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError"]
)
def test_permanent_reason_is_reported_at_once(reason):
    waiting = {"waiting": {"reason": reason, "message": 'secret "x" not found'}}
    told = pod(containerStatuses=[{"image": "train:1", "state": waiting}])
    evidence = hopeless(told)
    assert evidence is not None
    assert failure_class(evidence) == "user_bug"


def test_secret_that_kubelet_could_not_read_yet_is_waited_for():
    message = "failed to sync secret cache: timed out waiting for the condition"
    waiting = {"waiting": {"reason": "CreateContainerConfigError", "message": message}}
    waits = pod(containerStatuses=[{"image": "train:1", "state": waiting}])
    assert hopeless(waits) is None
    assert unreachable(waits) is None
    assert message in why_pending(waits)


def image_error(reason, message):
    waiting = {"waiting": {"reason": reason, "message": message}}
    return why_pending(pod(containerStatuses=[{"image": "train:1", "state": waiting}]))


LOOKUP = "dial tcp: lookup none.test on 10.96.0.10:53: "


def test_registrys_error_and_the_backoff_after_it_are_one_reason():
    first = image_error(
        "ErrImagePull", f"{LOOKUP}read udp 10.0.0.7:4711->10.96.0.10:53: i/o timeout"
    )
    later = image_error(
        "ErrImagePull", f"{LOOKUP}read udp 10.0.0.7:815->10.96.0.10:53: i/o timeout"
    )
    backoff = image_error("ImagePullBackOff", 'Back-off pulling image "none.test/train"')
    repeats = image_error(
        "ImagePullBackOff", f'Back-off pulling image "none.test/train": ErrImagePull: {first}'
    )
    for reason in (later, backoff, repeats):
        assert same_wait(reason, first)
    assert not same_wait(image_error("ErrImagePull", f"{LOOKUP}no such host"), first)
    assert not same_wait(backoff, "Unschedulable: 0/3 nodes are available: 3 Insufficient cpu.")


def test_other_number_of_nodes_is_no_other_reason():
    three = "Unschedulable: 0/3 nodes are available: 3 Insufficient cpu."
    assert same_wait("Unschedulable: 0/4 nodes are available: 4 Insufficient cpu.", three)
    assert not same_wait("Unschedulable: 0/3 nodes are available: 3 Insufficient memory.", three)


def test_other_name_of_a_pod_over_quota_is_no_other_reason():
    first, next_try = (
        f'Error creating: pods "run-a1-node-0-0-{name}" is forbidden: exceeded quota: no-gpus'
        for name in ("7hx2k", "qk9zd")
    )
    assert same_wait(next_try, first)
    assert not same_wait(next_try.replace("no-gpus", "one-trial"), first)


def test_image_of_an_init_container_counts():
    told = pod(initContainerStatuses=CAPTURED["image_denied"]["status"]["containerStatuses"])
    assert hopeless(told) is not None


def test_pod_being_created_is_waited_for():
    assert hopeless(CAPTURED["creating"]) is None
    assert unreachable(CAPTURED["creating"]) is None


def test_pending_pod_has_a_reason():
    assert why_pending(CAPTURED["unschedulable"]).startswith("Unschedulable: 0/1 nodes")
    assert why_pending(CAPTURED["image_denied"]).startswith("ErrImagePull: ")
    assert why_pending(CAPTURED["creating"]) == ""


@pytest.mark.parametrize(
    ("name", "waits"),
    [("unschedulable", True), ("creating", True), ("running", False), ("completed", False)],
)
def test_started_pod_is_recognized(name, waits):
    assert is_waiting(CAPTURED[name]) == waits


def test_node_index_is_read():
    assert node_of(CAPTURED["failed"]) == 1


def event(reason, message, seconds=0, kind="Warning"):
    last = f"2026-01-01T00:00:{seconds:02}Z"
    return {"type": kind, "reason": reason, "message": message, "lastTimestamp": last}


FORBIDDEN = 'Error creating: pods "run-a1-node-0-0-rq8vx" is forbidden: '
POLICY = event("FailedCreate", FORBIDDEN + 'violates PodSecurity "restricted:latest"')
QUOTA = event("FailedCreate", FORBIDDEN + "exceeded quota: no-gpus, requested: 1, limited: 0")
WEBHOOK = event("FailedCreate", 'Error creating: admission webhook "x" denied the request: no')
OPERATORS = event("FailedCreatePod", FORBIDDEN + 'violates PodSecurity "restricted:latest"')
TROUBLE = event("FailedCreate", "Error creating: Internal error occurred: etcdserver: timed out")


@pytest.mark.parametrize("told", [POLICY, OPERATORS, WEBHOOK])
def test_pods_rejected_by_admission_are_permanent(told):
    evidence = refused([told])
    assert evidence is not None
    assert failure_class(evidence) == "user_bug"


@pytest.mark.parametrize("told", [QUOTA, TROUBLE, event("Other", FORBIDDEN)])
def test_temporary_reasons_are_waited_for(told):
    assert refused([told]) is None


def test_missing_pod_has_a_reason():
    created = event("SuccessfulCreate", "Created job", 9, kind="Normal")
    other = event("Unhealthy", "something else", 5)
    assert why_absent([created]) == ""
    assert why_absent([created, other]) == "Unhealthy: something else"
    assert why_absent([created, other, QUOTA]) == QUOTA["message"]
    later = {**POLICY, "lastTimestamp": "2026-01-01T00:01:00Z"}
    assert why_absent([QUOTA, later]) == POLICY["message"]

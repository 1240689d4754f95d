"""What a node waited for, from the conditions of its job and its pod."""

from __future__ import annotations

from datetime import datetime

import pytest

from steadytrain.components.train.launch.evidence import pod_waited

BEGAN = datetime.fromisoformat("2026-01-01T00:00:00Z").timestamp()


def at(seconds):
    return f"2026-01-01T00:{seconds // 60:02}:{seconds % 60:02}Z"


def job(*, admitted=None):
    condition = {"type": "Suspended", "status": "False", "lastTransitionTime": at(admitted or 0)}
    status = {"conditions": [condition]} if admitted else {}
    return {"metadata": {"creationTimestamp": at(10)}, "status": status}


def pod(created, *, scheduled=None, state=None):
    condition = {"type": "PodScheduled", "status": "True", "lastTransitionTime": at(scheduled or 0)}
    return {
        "metadata": {"creationTimestamp": at(created)},
        "status": {
            "conditions": [condition] if scheduled else [],
            "containerStatuses": [{"state": state}] if state else [],
        },
    }


@pytest.mark.parametrize(
    ("job", "pod", "times"),
    [
        (
            job(admitted=40),
            pod(42, scheduled=50, state={"running": {"startedAt": at(70)}}),
            [10, 40, 50, 70],
        ),
        (
            job(),
            pod(12, scheduled=13, state={"terminated": {"startedAt": at(14)}}),
            [10, 12, 13, 14],
        ),
        (job(), pod(12, scheduled=13, state={"waiting": {}}), [10, 12, 13, None]),
        (job(), pod(12), [10, 12, None, None]),
        (job(), None, [10, None, None, None]),
        (None, pod(12, scheduled=13), [12, 12, 13, None]),
        (None, None, [None, None, None, None]),
    ],
)
def test_each_wait_has_the_clusters_times(job, pod, times):
    found = pod_waited(3, 1, job, pod)
    assert (found.attempt, found.node) == (3, 1)
    expected = [0.0 if time is None else BEGAN + time for time in times]
    assert [found.created, found.admitted, found.scheduled, found.started] == expected


def test_each_node_is_noted_once_when_it_starts_or_is_lost(api, follower, pod):
    server, _ = api
    made = follower()
    made.make()
    server.put("pods", pod(0))
    server.put("pods", pod(1, "Pending", {"waiting": {}}))
    made.look()
    made.look()
    assert [item.node for item in made.waits] == [0]
    gone = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    server.put("pods", pod(1, "Failed", gone))
    made.look()
    made.look()
    assert [(item.attempt, item.node) for item in made.waits] == [(3, 0), (3, 1)]


def test_server_that_hides_the_job_takes_nothing_from_following(api, follower, pod):
    server, _ = api
    made = follower()
    made.make()
    server.hidden = {"trainjobs"}
    for node in (0, 1):
        server.put("pods", pod(node))
    made.look()
    assert made.started == {0, 1}
    assert [item.created for item in made.waits] == [BEGAN, BEGAN]


def test_pods_know_the_span_of_their_attempt(job):
    made = job()
    manifest = type(made)(**{**vars(made), "variables": {"TRACEPARENT": "00-a-b-01"}})
    variables = manifest.manifests()[0][1]["spec"]["template"]["spec"]["replicatedJobs"][0]
    container = variables["template"]["spec"]["template"]["spec"]["containers"][0]
    assert {"name": "TRACEPARENT", "value": "00-a-b-01"} in container["env"]

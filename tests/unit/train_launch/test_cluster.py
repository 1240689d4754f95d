"""Calls to an API server that refuses, is unavailable, or loses an answer."""

from __future__ import annotations

import pytest

from steadytrain.components.shared.cluster import (
    POD,
    Denied,
    Refused,
    Unreachable,
    connect,
    this_pod_name,
)
from steadytrain.components.shared.retry import retry
from steadytrain.components.train.launch.job import TRAIN_JOB, TRAINING_RUNTIME


def named(name, **labels):
    return {"metadata": {"name": name, "labels": labels}}


def test_objects_are_created_found_and_deleted(api):
    server, cluster = api
    cluster.create(TRAIN_JOB, named("one", run="tiny"))
    server.put("trainjobs", named("other", run="large"))
    found = cluster.get(TRAIN_JOB, "one")
    assert found is not None
    assert found["metadata"]["name"] == "one"
    assert [item["metadata"]["name"] for item in cluster.list(TRAIN_JOB, {"run": "tiny"})] == [
        "one"
    ]
    cluster.delete(TRAIN_JOB, "one")
    assert cluster.get(TRAIN_JOB, "one") is None
    cluster.delete(TRAIN_JOB, "one")


def test_cluster_resources_are_listed(api):
    _, cluster = api
    assert cluster.offers(TRAIN_JOB)
    assert not cluster.offers(TRAINING_RUNTIME)


@pytest.mark.parametrize(
    ("status", "message", "remedy"),
    [
        (403, "pods is forbidden: User cannot", "Role"),
        (401, "Unauthorized", "Role"),
        (403, 'admission webhook "x" denied the request: no', "what the message names"),
        (403, 'trainjobs "x" is forbidden: exceeded quota: jobs', "what the message names"),
        (422, "spec.x: Required value", "what the message names"),
    ],
)
def test_rejection_shows_the_servers_words_and_what_to_do(api, status, message, remedy):
    server, cluster = api
    server.refusals["trainjobs"] = [(status, {"message": message, "reason": "Because"})]
    with pytest.raises(Refused, match="create TrainJob one in namespace training") as caught:
        cluster.create(TRAIN_JOB, named("one"))
    assert message in caught.value.message
    assert remedy in caught.value.remedy
    assert (caught.value.status, caught.value.reason) == (status, "Because")
    assert isinstance(caught.value, Denied) == (remedy == "Role")


@pytest.mark.parametrize("status", [401, 403])
def test_denial_leaves_cluster_resources_unknown(api, status):
    """Otherwise the step of a pipeline would train in its own pod instead."""
    server, cluster = api
    server.denial = status, {"message": "not now"}
    with pytest.raises(Denied, match="not now"):
        cluster.offers(TRAIN_JOB)


@pytest.mark.parametrize("status", [401, 403])
def test_temporary_denial_is_waited_for(api, status):
    server, cluster = api
    server.denial = status, {"message": "not now"}
    waits = []

    def wait(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            server.denial = None

    assert retry(lambda: cluster.list(POD), wait=wait) == []
    assert len(waits) == 3


def test_lasting_denial_is_reported_before_an_absence_would_be(api, monkeypatch):
    monkeypatch.setattr("steadytrain.components.shared.retry.DENIED_SECONDS", 0.0)
    server, cluster = api
    server.denial = 403, {"message": "not for you"}
    with pytest.raises(Denied, match="not for you"):
        retry(lambda: cluster.list(POD))


def test_server_that_comes_back_is_waited_for(api):
    server, cluster = api
    server.away = True
    waits = []

    def wait(seconds):
        waits.append(seconds)
        server.away = len(waits) < 3

    assert retry(lambda: cluster.list(POD), wait=wait) == []
    assert waits == sorted(waits)
    assert len(waits) == 3


def test_server_that_stays_down_is_reported(api, monkeypatch):
    monkeypatch.setattr("steadytrain.components.shared.retry.AWAY_SECONDS", 0.0)
    server, cluster = api
    server.away = True
    with pytest.raises(Unreachable, match="the server is starting"):
        retry(lambda: cluster.list(POD))


def test_broken_connection_is_reported(api):
    server, cluster = api
    server.lossy = True
    with pytest.raises(Unreachable, match="does not answer"):
        cluster.create(TRAIN_JOB, named("one"))


def test_missing_cluster_is_an_error_that_says_how_to_configure_one(monkeypatch, tmp_path):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(Unreachable) as caught:
        connect()
    assert "KUBECONFIG" in caught.value.remedy


def test_cluster_of_a_kubeconfig(monkeypatch, tmp_path):
    path = tmp_path / "config"
    path.write_text(
        "{current-context: c, clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}], "
        "contexts: [{name: c, context: {cluster: c, user: u, namespace: mine}}], "
        "users: [{name: u, user: {token: t}}]}"
    )
    monkeypatch.setenv("KUBECONFIG", str(path))
    cluster = connect()
    assert cluster.namespace == "mine"
    with pytest.raises(Unreachable):
        cluster.list(POD)


def test_no_own_pod_outside_a_pod(monkeypatch):
    monkeypatch.setenv("KFP_POD_NAME", "step-1")
    assert this_pod_name() == ""

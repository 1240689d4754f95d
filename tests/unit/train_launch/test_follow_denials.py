"""A server that denies access or is away concludes nothing about pods, unless it lasts."""

from __future__ import annotations

import time

import pytest

from steadytrain.components.shared import retry

from support.following import ended, failure, followed

DENIALS = [
    (401, {"message": "Unauthorized", "reason": "Unauthorized"}),
    (403, {"message": 'pods is forbidden: User "x" cannot list resource "pods"'}),
    (403, {}),
]
"""What an API server answers while it starts, before it knows tokens and roles."""


def test_running_pods_are_left_alone(api, follower, folder, pod):
    made = follower()
    api[0].put("pods", pod(0))
    api[0].put("pods", pod(1))
    made.look()
    assert (made.started, made.gone, folder.errors()) == ({0, 1}, set(), [])


def test_unavailable_server_proves_nothing(api, follower, folder, pod):
    made = follower(pods={"pending_timeout_seconds": 1e-6})
    api[0].put("pods", pod(0))
    api[0].put("pods", pod(1))
    made.start()
    while made.started != {0, 1}:
        time.sleep(0.01)
    api[0].away = True
    seen = len(api[0].calls)
    while len(api[0].calls) < seen + 3:
        time.sleep(0.01)
    made.ending.set()
    made.join()
    assert (made.gone, folder.errors()) == (set(), [])


@pytest.mark.parametrize("denial", DENIALS)
def test_denial_by_a_starting_server_proves_nothing(api, follower, folder, pod, denial):
    made = follower()
    followed(api, made, pod)
    api[0].denial = denial
    seen = len(api[0].calls)
    while len(api[0].calls) < seen + 3 and made.is_alive():
        time.sleep(0.01)
    assert (made.is_alive(), made.gone, folder.errors()) == (True, set(), [])
    api[0].denial = None
    del api[0].objects["pods", "tiny-a3-node-0-1-abcde"]
    while made.gone != {1}:
        time.sleep(0.01)
    ended(made)
    assert failure(folder).failure_class == "preemption"


@pytest.mark.parametrize("denial", DENIALS)
def test_lasting_denial_ends_the_attempt_with_the_missing_right(
    api, follower, folder, pod, denial, monkeypatch
):
    # As long as a server may be away.
    monkeypatch.setattr(retry, "AWAY_SECONDS", 0.2)
    made = follower()
    followed(api, made, pod)
    api[0].denial = denial
    made.join()
    assert made.gone == {0, 1}
    assert failure(folder).failure_class == "user_bug"
    assert "service account to the Role" in failure(folder).remedy


def test_intermittent_denials_prove_nothing(api, follower, folder, pod):
    made = follower()
    made._retry.denied_seconds = 0.3
    followed(api, made, pod)
    server, answer, since = api[0], api[0].answer, time.monotonic()

    def alternate(*request):
        server.denial = None if server.denial else DENIALS[0]
        return answer(*request)

    server.answer = alternate
    while made.is_alive() and time.monotonic() < since + 0.8:
        time.sleep(0.01)
    assert made.is_alive()
    ended(made)
    assert folder.errors() == []


@pytest.mark.parametrize("denial", DENIALS)
def test_job_is_created_after_a_temporary_denial(api, follower, denial):
    api[0].denial = denial
    made, waited = follower(), []

    def wait(seconds):
        waited.append(seconds)
        if len(waited) == 4:
            api[0].denial = None

    made.ending.wait = wait
    made.make()
    assert api[0].names("trainjobs") == ["tiny-a3"]


@pytest.mark.parametrize("denial", DENIALS)
def test_forbidden_job_ends_the_attempt_with_the_missing_right(
    api, follower, folder, monkeypatch, denial
):
    monkeypatch.setattr(retry, "DENIED_SECONDS", 0.2)
    api[0].denial = denial
    made = follower()
    made.run()
    assert made.gone == {0, 1}
    assert failure(folder).failure_class == "user_bug"
    assert "service account to the Role" in failure(folder).remedy

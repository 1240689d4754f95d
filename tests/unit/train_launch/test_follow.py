"""A job is created once, and the attempt's folder records what happens to its pods."""

from __future__ import annotations

import pytest

from steadytrain.components.shared import retry
from steadytrain.components.shared.cluster import Refused
from steadytrain.components.train.attempt import Exits, RankError
from steadytrain.components.train.launch.job import TRAIN_JOB
from steadytrain.components.train.launch.naming import FOLDER, GENERATION

from support.following import ended, event, failure

NOT_SEEN = 'TrainingRuntime.trainer.kubeflow.org "tiny-a3" not found'


def test_job_and_runtime_are_created(api, follower):
    follower().make()
    assert api[0].names("trainjobs") == api[0].names("trainingruntimes") == ["tiny-a3"]


def test_lost_response_creates_no_second_job(api, follower):
    server, _ = api
    server.lossy = True
    made = follower()
    made.ending.wait = lambda seconds: False
    made.make()
    assert server.names("trainjobs") == ["tiny-a3"]


def test_leftovers_of_an_earlier_supervisor_are_removed_first(api, follower, folder):
    server, _ = api
    made = follower()
    left = made.job.manifests()[-1][1]
    left["metadata"]["labels"][GENERATION] = "1"
    earlier = {**left, "metadata": {**left["metadata"], "name": "tiny-a2"}}
    server.put("trainjobs", left)
    server.put("trainjobs", earlier)
    made.make()
    assert server.names("trainjobs") == ["tiny-a3"]
    assert server.objects["trainjobs", "tiny-a3"]["metadata"]["labels"][GENERATION] == "2"


def test_job_of_another_run_with_that_name_is_left_alone(api, follower, folder):
    server, _ = api
    made = follower()
    other = made.job.manifests()[-1][1]
    other["metadata"]["annotations"][FOLDER] = "/elsewhere/runs/tiny/attempts/0003"
    server.put("trainjobs", other)
    made.run()
    assert server.objects["trainjobs", "tiny-a3"] == other
    assert made.gone == {0, 1}
    found = failure(folder)
    assert found.failure_class == "user_bug"
    assert "/elsewhere" in found.message
    assert "another name" in found.remedy


def test_runtime_that_trainer_has_not_seen_yet_is_waited_for(api, follower):
    server, _ = api
    server.refusals["trainjobs"] = [(403, {"message": f"webhook: {NOT_SEEN}"})] * 12
    made, waited = follower(), []
    made.ending.wait = lambda seconds: waited.append(seconds)
    made.make()
    assert server.names("trainjobs") == ["tiny-a3"]
    assert 58 < sum(waited) < 180  # it took 58 s after an outage of the API server


def test_runtime_that_trainer_never_sees_is_a_cluster_failure(api, follower, folder, monkeypatch):
    monkeypatch.setattr(retry, "AWAY_SECONDS", 0.0)
    api[0].refusals["trainjobs"] = [(403, {"message": f"webhook: {NOT_SEEN}"})]
    follower().run()
    assert failure(folder).failure_class == "network"
    assert NOT_SEEN in failure(folder).message


def test_rejection_ends_the_attempt_with_the_servers_message(api, follower, folder):
    server, _ = api
    server.refusals["trainjobs"] = [(403, {"message": "admission webhook denied: too many GPUs"})]
    made = follower()
    made.run()
    assert made.gone == {0, 1}
    assert failure(folder).failure_class == "user_bug"
    assert "too many GPUs" in failure(folder).message


def test_unavailable_server_ends_the_attempt_as_a_network_failure(
    api, follower, folder, monkeypatch
):
    monkeypatch.setattr(retry, "AWAY_SECONDS", 0.0)
    api[0].away = True
    made = follower()
    made.run()
    assert failure(folder).failure_class == "network"


@pytest.mark.parametrize("replaced", [False, True])
def test_missing_or_replaced_pod_is_lost(api, follower, folder, pod, replaced):
    made = follower()
    api[0].put("pods", pod(0))
    api[0].put("pods", pod(1))
    made.look()
    del api[0].objects["pods", "tiny-a3-node-0-1-abcde"]
    if replaced:
        api[0].put("pods", pod(1, uid="2"))
    made.look()
    assert made.gone == {1}
    assert failure(folder).failure_class == "preemption"
    assert "was deleted" in failure(folder).message
    assert failure(folder).rank == 1


def test_succeeded_pods_leave_no_error(api, follower, folder, pod):
    made = follower()
    done = {"terminated": {"exitCode": 0, "reason": "Completed"}}
    api[0].put("pods", pod(0, "Succeeded", done))
    api[0].put("pods", pod(1, "Succeeded", done))
    made.look()
    assert (made.gone, folder.errors()) == ({0, 1}, [])


def test_agents_report_is_not_repeated_in_other_words(api, follower, folder, pod):
    """The exit status says only that its ranks failed. The ranks have already reported why."""
    Exits(time=1.0, statuses={0: 1}).save(folder.node(0).exits)
    failed = {"terminated": {"exitCode": 1, "reason": "Error", "message": "some last line"}}
    made = follower()
    for node in (0, 1):
        api[0].put("pods", pod(node, "Failed", failed))
    made.look()
    (told,) = folder.errors()
    assert told.rank == 1
    assert "some last line" in told.message


def test_out_of_memory_is_reported_although_the_agent_reported_a_kill(api, follower, folder, pod):
    Exits(time=1.0, statuses={0: -9}).save(folder.node(0).exits)
    killed = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    made = follower()
    api[0].put("pods", pod(0, "Failed", killed))
    api[0].put("pods", pod(1))
    made.look()
    assert failure(folder).failure_class == "host_oom"
    assert "2Gi" in failure(folder).message


def test_pod_that_waits_too_long_is_reported_with_its_reason(api, follower, folder, pod):
    reason = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    waiting = pod(0, "Pending", conditions=[{**reason, "message": "0/3 nodes: no GPU"}])
    waiting["status"]["containerStatuses"] = []
    api[0].put("pods", waiting)
    api[0].put("pods", pod(1))
    made = follower(pods={"pending_timeout_seconds": 1000})
    made.look()
    (told,) = made.told
    assert made.gone == set()
    assert (told.attempt, told.message) == (3, "tiny-a3 waits: Unschedulable: 0/3 nodes: no GPU")
    made._since -= 1001
    made.look()
    assert failure(folder).failure_class == "pending_timeout"
    assert "0/3 nodes: no GPU" in failure(folder).message
    assert len(made.told) == 1


def test_volume_that_is_not_mounted_is_reported_from_the_pods_events(api, follower, folder, pod):
    creating = {"waiting": {"reason": "ContainerCreating"}}
    for node in (0, 1):
        api[0].put("pods", pod(node, "Pending", creating))
    name = "tiny-a3-node-0-0-abcde"
    api[0].put("events", event("MountVolume.SetUp failed", name=name, reason="FailedMount"))
    made = follower(pods={"pending_timeout_seconds": 1})
    made._since -= 2
    made.look()
    assert "FailedMount: MountVolume.SetUp failed" in failure(folder).message


def test_missing_image_ends_the_attempt_at_once(api, follower, folder, pod):
    waiting = {"waiting": {"reason": "ErrImagePull", "message": "own:1: not found"}}
    for node in (0, 1):
        api[0].put("pods", pod(node, "Pending", waiting))
    made = follower()
    made.look()
    assert made.gone == {0, 1}
    assert failure(folder).failure_class == "user_bug"
    assert "compute.pods.image" in failure(folder).remedy


def pulling(reason, message):
    return {"waiting": {"reason": reason, "message": message}}


def test_attempts_share_the_wait_for_a_registry_that_does_not_answer(api, follower, folder, pod):
    made = follower(pods={"pending_timeout_seconds": 900}, recovery={"max_failures_per_class": 3})
    for node in (0, 1):
        api[0].put("pods", pod(node, "Pending", pulling("ErrImagePull", "a: no such host")))
    made.look()
    for node in made._pulling:
        made._pulling[node] -= 200
    made.look()
    assert made.gone == set()
    for node in made._pulling:
        made._pulling[node] -= 101
    made.look()
    assert made.gone == {0, 1}
    assert failure(folder).failure_class == "pending_timeout"
    assert "no such host" in failure(folder).message


def test_each_change_of_reason_is_reported_once_and_then_the_end_of_the_wait(api, follower, pod):
    made = follower()
    reasons = [
        ("ErrImagePull", "lookup registry on 10.96.0.10:53: no such host"),
        ("ImagePullBackOff", 'Back-off pulling image "own:1"'),
        ("ErrImagePull", "dial tcp 10.1.1.1:443: connection refused"),
        ("ImagePullBackOff", 'Back-off pulling image "own:1"'),
    ]
    for reason in reasons:
        for node in (0, 1):
            api[0].put("pods", pod(node, "Pending", pulling(*reason)))
        made.look()
        made.look()
    for node in (0, 1):
        api[0].put("pods", pod(node))
    made.look()
    made.look()
    words = ["no such host", "connection refused", "have started"]
    assert len(made.told) == 3
    assert all(word in event.message for word, event in zip(words, made.told, strict=True))


def test_two_pods_that_wait_for_different_things_are_two_reports(api, follower, pod):
    made = follower()
    api[0].put("pods", pod(0, "Pending", pulling("ErrImagePull", "a: no such host")))
    api[0].put("pods", pod(1, "Pending", pulling("ErrImagePull", "a: connection refused")))
    for _ in range(5):
        made.look()
    assert len(made.told) == 2


def test_run_waits_for_a_quota_and_then_reports_it(api, follower, folder):
    made = follower(pods={"pending_timeout_seconds": 1000})
    made.make()
    api[0].put("events", event('pods "x" is forbidden: exceeded quota: gpus'))
    made._since -= 500
    made.look()
    assert made.gone == set()
    made._since -= 501
    made.look()
    assert failure(folder).failure_class == "pending_timeout"
    assert "exceeded quota: gpus" in failure(folder).message


def test_forbidden_pods_end_the_attempt_at_once(api, follower, folder):
    made = follower()
    made.make()
    made._since -= 10
    api[0].put("events", event('pods "x" is forbidden: violates PodSecurity "restricted"'))
    made.look()
    assert failure(folder).failure_class == "user_bug"
    assert "PodSecurity" in failure(folder).message


def test_job_deleted_before_it_has_pods_is_lost(api, follower, folder):
    made = follower()
    made.make()
    made._since -= 10
    api[1].delete(TRAIN_JOB, "tiny-a3")
    made.look()
    assert failure(folder).failure_class == "preemption"
    assert "TrainJob tiny-a3 was deleted" in failure(folder).message


def test_stop_request_ends_the_wait_for_a_server_that_is_down(api, follower, monkeypatch):
    monkeypatch.setattr(retry, "AWAY_SECONDS", 3600.0)
    api[0].away = True
    made = follower()
    made.start()
    ended(made)


def test_first_reason_stays(api, follower, folder, pod):
    made = follower()
    api[0].put("pods", pod(0))
    killed = pod(1, "Failed", {"terminated": {"exitCode": 137, "reason": "OOMKilled"}})
    api[0].put("pods", killed)
    made.look()
    del api[0].objects["pods", killed["metadata"]["name"]]
    made.look()
    assert RankError.load(folder.node(1).error).kind == "OOMKilled"


def test_missing_read_permission_ends_the_attempt(api, follower, folder, monkeypatch):
    def forbidden(*_, **__):
        raise Refused("cannot read events: forbidden", status=403, reason="Forbidden", remedy="ask")

    made = follower()
    monkeypatch.setattr(made, "look", forbidden)
    made.run()
    assert made.gone == {0, 1}
    assert failure(folder).message == "cannot read events: forbidden"
    assert failure(folder).remedy == "ask"


def test_unparsable_pod_ends_the_attempt_with_a_message(api, follower, folder, pod):
    strange = pod(0)
    del strange["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"]
    made = follower()
    made._cleared = True
    api[0].put("pods", strange)
    made.run()
    assert made.gone == {0, 1}
    assert "replica-index" in failure(folder).message

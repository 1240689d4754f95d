"""The launcher from start to end: which pods exist, what they receive, and their removal."""

from __future__ import annotations

import threading
import time

import pytest

from steadytrain.components.shared import retry
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import Warned
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.attempt import AttemptSpec, Exits
from steadytrain.components.train.launch import follow, own_pod, pods
from steadytrain.components.train.launch import launcher as launcher_module
from steadytrain.components.train.launch.job import PyTorchJob, TrainJob
from steadytrain.components.train.launch.launcher import launcher_for
from steadytrain.components.train.launch.pods import PodsLauncher
from steadytrain.components.train.launch.process import ProcessLauncher
from steadytrain.components.train.recovery.outcome import conclude

from support.command import wait_for


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(follow, "LOOK_SECONDS", 0.01)


@pytest.fixture
def launcher(api, config, tmp_path):
    def make(**told):
        volumes = [{"claim": "steadytrain", "path": str(tmp_path)}]
        made = config(pods={"image": "train:1", "volumes": volumes, **told})
        return PodsLauncher(made, api[1], TrainJob)

    return make


def test_attempt_runs_and_leaves_nothing(api, launcher, folder, capsys):
    server, _ = api
    made = launcher()
    assert made.world_size == 2
    with made.start(folder) as attempt:
        wait_for(lambda: server.names("trainjobs"))
        trainer = server.objects["trainjobs", "tiny-a3"]["spec"]["trainer"]
        assert trainer["image"] == "train:1"
        assert trainer["command"][1:] == [
            *("-m", "steadytrain.components.train.agent", "--ranks=1", "--threads=4"),
            *(str(folder.path), *made.program),
        ]
        assert not attempt.poll()
        folder.log(0).write_bytes(b"first line\n")
        assert not attempt.poll()
        for node in (0, 1):
            Exits(time=1.0, statuses={node: 0}).save(folder.node(node).exits)
        with folder.log(0).open("ab") as log:
            log.write(b"last line\n")
        assert attempt.poll()
        assert attempt.exits() == {0: 0, 1: 0}
    assert capsys.readouterr().out == "first line\nlast line\n"
    assert server.names("trainjobs") == server.names("trainingruntimes") == []


def test_attempt_waits_a_shorter_time_for_nodes_that_the_run_can_do_without(launcher, folder):
    made = launcher(pending_timeout_seconds=60)
    spec = AttemptSpec.load(folder.spec)
    limits = []
    for seconds in (None, 5.0, 300.0):
        spec.model_copy(update={"pending_seconds": seconds}).save(folder.spec)
        limits.append(made._job(folder).pods.pending_timeout_seconds)
    assert limits == [60, 5, 60]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_launcher_always_cleans_up(api, launcher, folder, error):
    def leave():
        wait_for(lambda: server.names("trainjobs"))
        raise error

    server, _ = api
    with pytest.raises(error), launcher().start(folder):
        leave()
    assert server.names("trainjobs") == server.names("trainingruntimes") == []
    assert folder.leave.read_text() == "0"


def test_no_job_is_created_after_an_immediate_exit(api, launcher, folder):
    with launcher().start(folder):
        pass
    assert api[0].names("trainjobs") == api[0].names("trainingruntimes") == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("job-")]


def test_stop_does_not_wait_for_a_pod_that_has_not_started(api, launcher, folder):
    with launcher().start(folder) as attempt:
        wait_for(lambda: api[0].names("trainjobs"))
        assert not attempt.poll()
        attempt.stop(30)
        assert attempt.poll()


def test_running_pod_is_waited_for(api, launcher, folder, pod):
    with launcher().start(folder) as attempt:
        wait_for(lambda: api[0].names("trainjobs"))
        for node in (0, 1):
            api[0].put("pods", pod(node))
        wait_for(lambda: len(attempt.follower.started) == 2)
        attempt.stop(30)
        assert not attempt.poll()


def test_running_pod_with_a_silent_agent_is_a_hang(api, launcher, folder, pod, config):
    """For example, its image hangs before the agent starts, or its volume does not respond."""
    quick = config(recovery={"start_timeout_seconds": 0.5})
    (folder.path.parents[3] / "config.yaml").write_text(quick.to_yaml())
    with launcher().start(folder) as attempt:
        wait_for(lambda: api[0].names("trainjobs"))
        for node in (0, 1):
            api[0].put("pods", pod(node))
        wait_for(attempt.poll)
    failure = conclude(folder, attempt.exits(), None).failure
    assert failure.failure_class == "hang"
    assert "gave no sign of life" in failure.message


def test_invisible_pods_are_waited_for_a_bounded_time(api, launcher, folder, config, monkeypatch):
    monkeypatch.setattr(retry, "AWAY_SECONDS", 0.0)
    quick = config(recovery={"start_timeout_seconds": 0.3})
    (folder.path.parents[3] / "config.yaml").write_text(quick.to_yaml())
    began = time.monotonic()
    with launcher(pending_timeout_seconds=1.0).start(folder) as attempt:
        wait_for(lambda: api[0].names("trainjobs"))
        api[0].away = True
        wait_for(attempt.poll)
        assert time.monotonic() - began > 1.3, "they may be waiting for a node"
    assert conclude(folder, attempt.exits(), None).failure.failure_class == "hang"


def test_clusters_reason_for_a_stop_takes_precedence(api, launcher, folder, pod):
    server, _ = api
    target = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
    with launcher().start(folder) as attempt:
        wait_for(lambda: server.names("trainjobs"))
        for node in (0, 1):
            server.put("pods", pod(node))
        wait_for(lambda: len(attempt.follower.started) == 2)
        attempt.follower.end()
        taken = pod(1)
        taken["status"]["conditions"] = [{**target, "message": "for a pod of higher priority"}]
        server.put("pods", taken)
        for node in (0, 1):
            Exits(time=1.0, statuses={node: 143}).save(folder.node(node).exits)
        assert attempt.poll()
    ending = conclude(folder, attempt.exits(), None)
    assert ending.outcome == "preempted"
    assert "PreemptionByScheduler" in ending.failure.message


def test_job_that_cannot_be_removed_is_reported(api, launcher, folder, monkeypatch, capsys):
    monkeypatch.setattr(retry, "AWAY_SECONDS", 0.0)
    with launcher().start(folder):
        wait_for(lambda: api[0].names("trainjobs"))
        api[0].away = True
    assert "not removed" in capsys.readouterr().err


def test_missing_image_is_reported_before_any_request(launcher):
    with pytest.raises(BadInput, match=r"compute\.pods\.image"):
        launcher(image=None)


@pytest.mark.parametrize("volumes", [[], [{"claim": "steadytrain", "path": "/elsewhere"}]])
def test_output_not_shared_by_the_pods_is_rejected(launcher, volumes):
    with pytest.raises(BadInput, match="is not on a volume"):
        launcher(volumes=volumes)


def test_missing_fields_come_from_the_steps_own_pod(api, config, monkeypatch, tmp_path):
    server, here = api
    container = {
        "name": "main",
        "image": "own:1",
        "volumeMounts": [{"name": "volume", "mountPath": str(tmp_path)}],
    }
    claim = {"name": "volume", "persistentVolumeClaim": {"claimName": "mine"}}
    spec = {"containers": [container], "volumes": [claim]}
    server.put("pods", {"metadata": {"name": "step-1", "labels": {}}, "spec": spec})
    monkeypatch.setattr(own_pod, "this_pod_name", lambda: "step-1")
    made = PodsLauncher(config(), here, TrainJob)
    assert made.own.image == "own:1"
    assert made.own.volumes == [claim]


def test_training_runs_locally_outside_a_step(config):
    here = config(launcher="auto", nodes=1)
    with launcher_for(here) as found:
        assert isinstance(found, ProcessLauncher)
    with pytest.raises(BadInput, match="one machine"), launcher_for(config(launcher="auto")):
        pass


@pytest.mark.parametrize(
    ("asked", "offers", "kind"),
    [
        ("auto", {"TrainJob", "PyTorchJob"}, TrainJob),
        ("auto", {"PyTorchJob"}, PyTorchJob),
        ("pytorchjob", {"TrainJob"}, PyTorchJob),
        ("auto", set(), None),
    ],
)
def test_step_trains_with_the_clusters_job_kind(
    api, config, monkeypatch, tmp_path, asked, offers, kind
):
    monkeypatch.setattr(launcher_module, "this_pod_name", lambda: "step-1")
    monkeypatch.setattr(launcher_module, "connect", lambda: api[1])
    monkeypatch.setattr(api[1], "offers", lambda found: found.name in offers)
    volumes = [{"claim": "steadytrain", "path": str(tmp_path)}]
    told = config(launcher=asked, nodes=1, pods={"image": "train:1", "volumes": volumes})
    with launcher_for(told) as found:
        if kind:
            assert isinstance(found, PodsLauncher)
            assert found.job is kind
        else:
            assert isinstance(found, ProcessLauncher)


def test_host_memory_is_the_pods_limit(launcher):
    assert launcher().host_memory == 16 * 2**30
    assert launcher(memory="96G").host_memory == 96 * 10**9


@pytest.mark.parametrize(
    ("pods", "device"),
    [
        ({}, "cpu"),
        ({"gpus": 8}, "nvidia.com/gpu"),
        ({"gpus": 8, "node_selector": {"nvidia.com/gpu.product": "A100"}}, "A100"),
    ],
)
def test_device_follows_the_pods_request(launcher, pods, device):
    assert launcher(**pods).device == device


def test_last_look_comes_after_those_of_the_thread(api, launcher, folder, monkeypatch):
    """Two at once would note a pod twice, and write to one stream from two threads."""
    slow, looks = threading.Event(), []

    def look(follower):
        looks.append((threading.current_thread(), follower.is_alive()))
        slow.wait(0.2)

    monkeypatch.setattr(follow.JobFollower, "look", look)
    with launcher().start(folder) as attempt:
        wait_for(lambda: looks)
    *others, last = looks
    assert others
    assert set(others) == {(attempt.follower, True)}
    assert last == (threading.main_thread(), False)


def test_nodes_whose_pods_cannot_be_killed_are_avoided(
    api, config, folder, pod, tmp_path, monkeypatch
):
    monkeypatch.setattr(pods, "SLACK_SECONDS", 0)
    volumes = [{"claim": "steadytrain", "path": str(tmp_path)}]
    zone = {"key": "zone", "operator": "In", "values": ["a"]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [zone]}]}
    rules = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    shown = {"image": "train:1", "volumes": volumes, "affinity": rules}
    made = PodsLauncher(config(pods=shown, recovery={"stop_grace_seconds": 0.1}), api[1], TrainJob)
    stuck = pod(0)
    stuck["metadata"]["name"] = "held-by-its-kubelet"
    stuck["spec"]["nodeName"] = "machine-7"
    with made.start(folder):
        api[0].put("pods", stuck)
    events = read_events(Workspace.of(made.config).events)
    (warned,) = (event for event in events if isinstance(event, Warned))
    assert "not removed within" in warned.message
    assert "held-by-its-kubelet; later attempts avoid machine-7" in warned.message

    affinity = made._job(folder)._pod_template()["spec"]["affinity"]
    (term,) = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    avoided = {"key": "metadata.name", "operator": "NotIn", "values": ["machine-7"]}
    assert term == {"matchExpressions": [zone], "matchFields": [avoided]}

    with made.start(folder):
        api[0].objects.clear()
    assert made._job(folder)._pod_template()["spec"]["affinity"] == rules

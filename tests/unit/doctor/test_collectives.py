"""What ranks exchange: its speed, and which rank is in the way if it fails."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
from kubernetes import client
from typer.testing import CliRunner

from steadytrain.components.shared.config import ComputeConfig
from steadytrain.components.shared.quantities import size
from steadytrain.components.train.launch.collectives import judged, run_here
from steadytrain.components.train.launch.job import TRAIN_JOB, TRAINING_RUNTIME
from steadytrain.components.train.loop.collective_probe import LARGE
from steadytrain.pipelines.cli import app
from steadytrain.pipelines.cluster.access import Cluster
from steadytrain.pipelines.cluster.trial import probe_job, try_collectives

from support.odd import call

STANDS_STILL = """
import os, time
if os.environ["RANK"] == "0":
    time.sleep({late})
from steadytrain.components.train.loop.collective_probe import main, report
report("started")
if os.environ["RANK"] == "1":
    {what}
main(60)
"""


def stage(rank, name, **about):
    return json.dumps({"rank": rank, "stage": name, "host": f"pod-{rank}", **about})


def finished(rank):
    about = {"latency": 5e-5, "seconds": 0.01, "bytes": 8 << 20, "backend": "nccl"}
    return stage(rank, "finished", **about)


def test_bandwidth_follows_from_the_bytes_that_ring_all_reduce_moves():
    """Each of 4 ranks sends and receives 2 x 3/4 of 8 MiB, 8.39 MB, in 10 ms."""
    found = judged([finished(rank) for rank in range(4)], 4, 60)
    assert found.good
    assert "one of 8.39 MB moves 1.26 GB a second" in found.text
    assert "of 8 bytes takes 50 us" in found.text


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([stage(0, "joining")], "rank 1 has not started; the others (0) wait for it"),
        (
            [stage(0, "joining"), stage(1, "started")],
            "rank 1 on pod-1 has started and does not join; the others (0)",
        ),
        (
            [
                stage(0, "latency"),
                stage(1, "joining"),
                '{"rank": 1, "stage": "ended", "status": 9}',
            ],
            "rank 1 on pod-1 joins the others (ended with status 9)",
        ),
        ([stage(0, "joining"), stage(1, "joining")], "no rank got further: rank 0 on pod-0"),
        ([finished(0), stage(1, "bandwidth")], "rank 1 on pod-1 is in the large all-reduce"),
    ],
)
def test_rank_that_is_behind_the_others_is_named(lines, said):
    found = judged(lines, 2, 60)
    assert not found.good
    assert said in found.text
    assert found.remedy


def test_failure_has_what_nccl_says():
    log = "h:1:1 [0] misc/socket.cc:484 NCCL WARN Connect to 10.0.0.3<41> failed : refused"
    text = judged([stage(0, "joining"), log, stage(1, "joining")], 2, 60).text
    assert "warning: Connect to 10.0.0.3<41> failed : refused" in text


@pytest.mark.slow
def test_doctor_measures_real_ranks():
    done = CliRunner().invoke(app, ["doctor", "--distributed", "--ranks", "2", "--json"])
    assert done.exit_code == 0, done.output
    (check,) = json.loads(done.stdout)["checks"]
    assert check["state"] == "pass"
    assert "2 ranks by gloo: an all-reduce of 8 bytes takes" in check["text"]
    assert f"one of {size(LARGE['cpu'])} moves" in check["text"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "late", "state"),
    [
        ("os.kill(os.getpid(), 19)", 0, "has started and does not join"),
        ("os._exit(3)", 0, "has started and does not join (ended with status 3)"),
        ("os._exit(3)", 8, "has started and does not join (ended with status 3)"),
    ],
)
def test_real_rank_that_stands_still_or_dies_is_named_in_time(tmp_path, what, late, state):
    """Also if the other one imports PyTorch for longer than a rank may outlive a dead one."""
    program = tmp_path / "rank.py"
    program.write_text(STANDS_STILL.format(what=what, late=late))
    lines = list(run_here(2, 60, variables={}, program=(sys.executable, str(program))))
    found = judged(lines, 2, 60)
    assert not found.good
    assert "rank 1 on" in found.text
    assert state in found.text


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--distributed", "--cluster"), "--distributed is for this machine"),
        (("--nodes", "2"), "--nodes needs --cluster"),
        (("--ranks", "2"), "--ranks: nothing starts ranks"),
    ],
)
def test_options_that_contradict_each_other_are_refused(tmp_path, words, part):
    done = call("doctor", *words, folder=tmp_path)
    assert done.code == 2
    assert part in done.err


def test_job_has_the_pods_and_the_command_of_the_check():
    compute = ComputeConfig(device="cuda", nproc_per_node=8, nccl={"NCCL_SOCKET_IFNAME": "eth0"})
    job = probe_job(compute, 2, 0, 60, "steadytrain/train:1")
    manifests = dict(job.manifests())
    trainer = manifests[TRAIN_JOB]["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)
    assert trainer["command"][-3:] == ["--ranks=8", "--nodes=2", "--seconds=60"]
    (node,) = manifests[TRAINING_RUNTIME]["spec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]
    client.ApiClient()._ApiClient__deserialize(pod["spec"], "V1PodSpec").to_dict()
    (container,) = pod["spec"]["containers"]
    assert {"name": "NCCL_SOCKET_IFNAME", "value": "eth0"} in container["env"]
    assert pod["metadata"]["labels"]["steadytrain.io/run"] == job.name


class Answers:
    """The API server's objects and pods."""

    def __init__(self, logs, phase="Succeeded", waits="", **phases):
        self.logs, self.made, self.gone = logs, [], []
        said = [SimpleNamespace(status="False", message=waits)]
        self.pods = [
            SimpleNamespace(
                metadata=SimpleNamespace(name=name),
                status=SimpleNamespace(phase=phases.get(name, phase), conditions=said),
            )
            for name in logs
        ]

    def create_namespaced_custom_object(self, *where, _request_timeout):
        self.made.append(where[3])

    def delete_namespaced_custom_object(self, *where, _request_timeout):
        self.gone.append(where[3])

    def list_namespaced_pod(self, namespace, label_selector, _request_timeout):
        self.selector = label_selector
        return SimpleNamespace(items=self.pods)

    def read_namespaced_pod_log(self, name, namespace, **options):
        return SimpleNamespace(data=self.logs[name].encode())


@pytest.fixture
def answering(monkeypatch):
    def answer(*given, **options):
        found = Answers(*given, **options)
        monkeypatch.setattr(client, "CustomObjectsApi", lambda api: found)
        monkeypatch.setattr(client, "CoreV1Api", lambda api: found)
        return found

    return answer


def tried(pending=0.0):
    job = probe_job(None, 2, 1, 0.1, "steadytrain/train:1")
    return job, try_collectives(Cluster(None, "team"), job, 0.1, pending)


def test_cluster_check_reads_every_pod_and_deletes_what_it_made(answering):
    api = answering({"a": finished(0), "b": finished(1)})
    job, line = tried()
    assert line.state == "pass"
    assert line.text.startswith("2 pods, 2 ranks by nccl")
    assert api.made == ["trainingruntimes", "trainjobs"]
    assert api.gone == ["trainjobs", "trainingruntimes"]
    assert f"steadytrain.io/run={job.name}" in api.selector


def test_cluster_check_names_the_pod_that_hangs(answering):
    answering({"a": stage(0, "latency"), "b": stage(1, "started")}, phase="Running")
    _, line = tried()
    assert line.state == "fail"
    assert "rank 1 on pod-1 has started and does not join" in line.text


def test_pods_that_do_not_start_are_reported_with_the_schedulers_message(answering):
    answering({"a": "", "b": ""}, phase="Pending", waits="0/3 nodes: Insufficient nvidia.com/gpu")
    _, line = tried()
    assert "0 of 2 pods have started" in line.text
    assert "Insufficient nvidia.com/gpu" in line.text


def test_pod_that_stays_pending_is_reported_although_another_waits_for_it(answering):
    logs = {"a": stage(0, "joining"), "b": ""}
    answering(logs, a="Running", b="Pending", waits="0/1 nodes: Insufficient cpu")
    _, line = tried()
    assert "1 of 2 pods have started" in line.text
    assert "Insufficient cpu" in line.text


def test_output_of_a_rank_that_hangs_is_yielded_before_its_time_is_over(tmp_path):
    program = tmp_path / "rank.py"
    program.write_text('import time; print(\'{"stage": "here"}\', flush=True); time.sleep(600)')
    # Longer than a test may take.
    lines = run_here(1, 3600, variables={}, program=(sys.executable, str(program)))
    assert next(lines) == '{"stage": "here"}'
    lines.close()

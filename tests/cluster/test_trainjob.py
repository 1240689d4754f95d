"""The train step in a pod, its ranks in pods of TrainJobs, and the faults that hit them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections import Counter, defaultdict

import pytest
from kubernetes import client
from kubernetes.watch import Watch
from urllib3.exceptions import HTTPError

from steadytrain.components.shared.events.types import (
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    PodsPending,
    StepStarted,
    TrainingStep,
)
from steadytrain.components.train.loop.job_status import ADDRESS

from support.launched import OUTPUT, STEPS
from support.otlp import receiving
from support.s3 import make_bucket, moto_server
from support.scraped_pods import counters, scraping

API_STOP, API_START = "STEADYTRAIN_TEST_API_STOP", "STEADYTRAIN_TEST_API_START"
PORT = 9090
HOPELESS = {
    "unschedulable": {"cpu": "1000"},
    "no-image": {"image": "example.test/none:1"},
    "wrong-image": {"image": "example.test/None:1"},
    "over-quota": {"gpus": 1},
}
TAINT = {"key": "steadytrain.io/test", "value": "", "effect": "NoSchedule"}


@pytest.fixture(scope="module")
def undisturbed(launched):
    """Train on two nodes without any fault; return the log."""
    phase, log = launched.end(launched.start("undisturbed"), 900)
    assert phase == "Succeeded", log
    return log


def test_two_nodes_train_under_the_service_account_and_leave_nothing(launched, undisturbed):
    assert launched.record("undisturbed")["attempts"] == 1
    assert len(launched.losses("undisturbed")) == STEPS
    assert launched.left("undisturbed") == []


def test_log_of_rank_0_is_in_the_steps_log(launched, undisturbed):
    folder = f"{_runs(launched)}/undisturbed/attempts/0001"
    told = launched.cluster.read(f"{folder}/rank-0.log").splitlines()
    assert told
    assert all(line in undisturbed for line in told)
    assert "rank-1.log" in launched.cluster.shell("ls", folder)


@pytest.fixture(scope="module")
def collector():
    """Yield a collector of OpenTelemetry that pods can reach."""
    with receiving(host="0.0.0.0") as receiver:
        yield receiver


@pytest.fixture(scope="module")
def watching(launched, collector):
    """Return the settings of a run that is traced and scraped."""
    return {
        # A pod without a node is given up after this.
        "compute": {"pods": {"pending_timeout_seconds": 30}},
        "tracking": {"sinks": ["otlp"]},
        "observability": {
            "otlp_endpoint": f"http://{_this_machine(launched)}:{collector.port}",
            "prometheus_port": PORT,
            "prometheus_linger_seconds": 0,
        },
    }


@pytest.fixture(scope="module")
def scrapes(launched):
    with scraping(launched.cluster.namespace, ("first", "second"), PORT) as found:
        yield found


@pytest.fixture(scope="module")
def disturbed(launched, undisturbed, watching, scrapes):
    """Inject all of these faults into one run, in turn; return the log of its last supervisor."""
    run = "disturbed"
    launched.start(run, pod="first", **watching)
    _delete_a_pod_with_the_node_tainted(launched, run)
    launched.until(run, CheckpointSaved, lambda event: event.attempt == 3)
    # To the job, this looks like the loss of the launcher's machine.
    launched.kill("first")
    launched.start(run, pod="second", **watching)
    launched.until(run, TrainingStep, lambda event: event.attempt == 4)
    _stop_the_api_server(launched.cluster.core)
    phase, log = launched.end("second", 900)
    assert phase == "Succeeded", log
    return log


def _this_machine(launched):
    """Return this machine's address as pods can reach it: its node's, if they are the same."""
    (address, *_) = launched.cluster.core.list_node().items[0].status.addresses
    return address.address


def _delete_a_pod_with_the_node_tainted(launched, run):
    launched.until(run, CheckpointSaved, lambda event: event.attempt == 1)
    core = launched.cluster.core
    with _tainted(core):
        pod = launched.pods(run, attempt=1)[1]
        core.delete_namespaced_pod(pod.metadata.name, pod.metadata.namespace)
        launched.until(run, AttemptEnded, lambda event: event.attempt == 2)


def _stop_the_api_server(core):
    """Stop the API server for half a minute; do nothing if the commands for it are not set."""
    stop, start = os.environ.get(API_STOP), os.environ.get(API_START)
    if stop and start:
        subprocess.run(stop, shell=True, check=True)
        try:
            time.sleep(30)
        finally:
            subprocess.run(start, shell=True, check=True)
            _until_it_is_ready(core)


def test_disturbed_run_has_the_weights_of_an_undisturbed_one(launched, disturbed):
    weights = [launched.record(run)["weights_digest"] for run in ("undisturbed", "disturbed")]
    assert weights[0] == weights[1]
    assert launched.left("disturbed") == []


def test_disturbed_run_is_one_trace_with_each_part_once(launched, disturbed, watching, collector):
    launched.report("disturbed", **watching)
    assert len({span.trace_id for span in collector.spans}) == 1
    spans = {span.span_id: span for span in collector.spans}.values()
    named = Counter(span.name for span in spans)
    assert named["attempt"] == len(launched.ended("disturbed"))
    assert named["checkpoint"] == len(launched.events("disturbed", CheckpointSaved))
    # Each of four attempts had two pods. Those of the second found no node.
    assert (named["admission"], named["image pull"]) == (2 * 4, 2 * 3)
    assert sum(collector.points("training_duration_seconds")[-1].bucket_counts) == 1


def test_counters_of_a_disturbed_run_never_fall(disturbed, scrapes):
    found = counters(scrapes)
    attempts = next(values for name, values in found.items() if name.startswith("attempts_total"))
    assert attempts[-1] == 4
    assert all(values == sorted(values) for values in found.values()), found


def test_each_fault_is_reported_by_name(launched, disturbed):
    deleted, pending, lost, last = launched.ended("disturbed")
    assert (deleted.failure_class, pending.failure_class) == ("preemption", "pending_timeout")
    assert "was deleted" in deleted.message
    assert "untolerated taint" in pending.message
    # A kubelet sends SIGTERM first, even when told to kill immediately, so either outcome is
    # possible.
    assert lost.outcome == "preempted" or "supervised" in lost.message
    assert last.outcome == "finished"


def test_pending_reason_is_reported_while_waiting(launched, disturbed):
    reasons = [event.reason for event in launched.events("disturbed", PodsPending)]
    # A reason that stays the same is reported once, however long it lasts.
    assert len([reason for reason in reasons if reason.startswith("Unschedulable")]) == 1


@pytest.mark.skipif(not os.environ.get(API_STOP), reason=f"{API_STOP} is not set")
def test_unavailable_api_server_costs_no_attempt(launched, disturbed):
    assert len(launched.classes("disturbed")) == 4


@pytest.fixture(scope="module")
def hopeless(launched):
    """Run all that can never start or finish at once; return each run's phase and log."""
    _forbid_gpus(launched.cluster)
    once = {"recovery": {"max_failures_per_class": 1}}
    for run, pods in HOPELESS.items():
        pods = {**pods, "pending_timeout_seconds": 30}
        launched.start(run, compute={"pods": pods}, **once)
    launched.start("killed", compute={"pods": {"memory": "150Mi"}})
    return {run: launched.end(run) for run in (*HOPELESS, "killed")}


@pytest.mark.parametrize(
    ("run", "reason", "failure_class"),
    [
        ("unschedulable", "Insufficient cpu", "pending_timeout"),
        ("no-image", "example.test/none:1", "pending_timeout"),
        ("wrong-image", "InvalidImageName", "user_bug"),
        ("over-quota", "exceeded quota: no-gpus", "pending_timeout"),
    ],
)
def test_hopeless_pod_ends_with_the_clusters_reason(launched, hopeless, run, reason, failure_class):
    phase, log = hopeless[run]
    assert phase == "Failed"
    assert launched.classes(run) == [failure_class]
    reasons = [event.reason for event in launched.events(run, PodsPending)]
    assert len(set(reasons)) == len(reasons) <= 2, reasons
    assert reason in log
    assert "fix: " in log
    assert launched.left(run) == []


def test_oom_in_a_rank_halves_the_micro_batch_in_the_next_job(launched, undisturbed):
    phase, log = launched.end(
        launched.start("short", faults="forward:1", data={"task": "support.faults:RunsOut"})
    )
    assert phase == "Succeeded", log
    assert launched.classes("short") == ["gpu_oom", ""]
    assert launched.micro_batches("short") == [4, 2]
    losses = launched.losses("undisturbed")
    assert launched.losses("short") == pytest.approx(losses, rel=1e-6)
    assert launched.left("short") == []


def test_pod_killed_at_its_memory_limit_is_reported_as_memory_and_falls_back(launched, hopeless):
    phase, log = hopeless["killed"]
    assert phase == "Failed"
    assert set(launched.classes("killed")) == {"host_oom"}
    assert launched.micro_batches("killed")[-1] == 1
    assert "OOMKilled" in log
    assert launched.left("killed") == []


def _runs(launched):
    return f"{OUTPUT}/runs"


@pytest.fixture(scope="module")
def s3(launched):
    """Yield environment variables for an S3 server on this machine, with a bucket."""
    with moto_server("0.0.0.0") as port:
        make_bucket(port, "bucket")
        yield {
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://{_this_machine(launched)}:{port}",
        }


def test_run_continues_on_fewer_nodes_if_capacity_is_lost_for_good(launched, undisturbed, s3):
    run, recovery = "elastic", {"min_nodes": 1, "checkpoints": "s3://bucket/checkpoints"}
    pods = {"pending_timeout_seconds": 30}
    launched.start(run, env=s3, compute={"pods": pods}, recovery=recovery)
    launched.until(run, CheckpointSaved, lambda event: event.attempt == 1)
    with _room_for_one_pod(launched):
        pod = launched.pods(run, attempt=1)[1]
        launched.cluster.core.delete_namespaced_pod(pod.metadata.name, pod.metadata.namespace)
        phase, log = launched.end(run, 900)
    assert phase == "Succeeded", log
    assert launched.classes(run) == ["preemption", "pending_timeout", ""]
    begun = launched.events(run, AttemptStarted)
    assert [event.nodes for event in begun] == [2, 2, 1]
    batches = [
        event.batch.micro_batch_size * event.gradient_accumulation_steps * event.world_size
        for event in begun
    ]
    assert batches == [8, 8, 8]
    assert begun[-1].resumed_from_step
    losses = launched.losses("undisturbed")
    assert launched.losses(run) == pytest.approx(losses, rel=1e-6)
    assert launched.left(run) == []


def test_last_attempt_after_spot_preemptions_requests_on_demand(launched, undisturbed):
    run, core = "spot", launched.cluster.core
    label = {"steadytrain.io/test-spot": "true"}
    tolerations = [{"key": TAINT["key"], "operator": "Exists"}]
    pods = {"spot": {"node_selector": label, "tolerations": tolerations}}
    recovery = {"max_preemptions": 2, "on_demand_at_last": True}
    with _labelled(core, label):
        launched.start(run, compute={"pods": pods}, recovery=recovery)
        launched.until(run, StepStarted, lambda event: event.stage == "train")
        with _tainted(core):
            launched.until(run, CheckpointSaved, lambda event: event.attempt == 1)
            spot = launched.pods(run, attempt=1)[1]
            _evict(core, spot.metadata)
            launched.until(run, AttemptEnded, lambda event: event.attempt == 1)
    launched.until(run, TrainingStep, lambda event: event.attempt == 2)
    on_demand = launched.pods(run, attempt=2)[1]
    phase, log = launched.end(run, 900)
    assert phase == "Succeeded", log
    assert launched.classes(run) == ["preemption", ""]
    assert spot.spec.node_selector == label
    assert not on_demand.spec.node_selector
    assert TAINT["key"] not in [item.key for item in on_demand.spec.tolerations]
    # An earlier run may have stored a smaller micro-batch, which this one then uses.
    losses = launched.losses("undisturbed")
    assert launched.losses(run) == pytest.approx(losses, rel=1e-6)


@pytest.fixture(scope="module")
def reporting(launched):
    """Skip unless Kubeflow Trainer takes the progress of a TrainJob."""
    (version, *_) = (
        client.ApiextensionsV1Api()
        .read_custom_resource_definition("trainjobs.trainer.kubeflow.org")
        .spec.versions
    )
    if "trainerStatus" not in version.schema.open_apiv3_schema.properties["status"].properties:
        pytest.skip("Kubeflow Trainer before 2.2: a TrainJob has no status.trainerStatus")


def test_trainjobs_status_has_the_progress_of_a_run_that_lost_a_pod(
    launched, undisturbed, reporting
):
    run = "told"
    with _watched_jobs(launched.cluster.namespace) as told:
        launched.start(run)
        launched.until(run, CheckpointSaved, lambda event: event.attempt == 1)
        pod = launched.pods(run, attempt=1)[1]
        if ADDRESS not in {item.name for item in pod.spec.containers[0].env}:
            launched.kill(run)
            pytest.skip("Kubeflow Trainer's feature gate TrainJobStatus is off")
        launched.cluster.core.delete_namespaced_pod(pod.metadata.name, pod.metadata.namespace)
        phase, log = launched.end(run, 900)
    assert phase == "Succeeded", log
    assert "status is not updated" not in log
    assert launched.classes(run) == ["preemption", ""]
    weights = [launched.record(name)["weights_digest"] for name in ("undisturbed", run)]
    assert weights[0] == weights[1]
    # The first attempt was lost before its end; the second has the whole run behind it.
    first, last = (told[f"{run}-a{attempt}"] for attempt in (1, 2))
    assert all(status["progressPercentage"] < 100 for status in first)
    percents = [status["progressPercentage"] for status in last]
    left = [status.get("estimatedRemainingSeconds") for status in last]
    print("percent:", percents, "seconds left:", left)
    assert percents == sorted(percents)
    assert (percents[-1], left[-1]) == (100, 0)
    # The first update may come before the first step.
    assert None not in left[1:]
    metrics = {item["name"]: item["value"] for item in last[-1]["metrics"]}
    assert (metrics["step"], metrics["max_steps"]) == (str(STEPS), str(STEPS))
    assert float(metrics["loss"]) == pytest.approx(launched.losses(run)[STEPS], rel=1e-5)
    assert "eval_loss" in metrics
    assert launched.left(run) == []


@contextlib.contextmanager
def _watched_jobs(namespace):
    """Yield each status.trainerStatus that a TrainJob of the namespace gets, by the job's name."""
    found, watch = defaultdict(list), Watch()

    def follow():
        listed = client.CustomObjectsApi().list_namespaced_custom_object
        place = ("trainer.kubeflow.org", "v1alpha1", namespace, "trainjobs")
        for event in watch.stream(listed, *place, _request_timeout=900):
            job = event["object"]
            status = job.get("status", {}).get("trainerStatus")
            known = found[job["metadata"]["name"]]
            if status and known[-1:] != [status]:
                known.append(status)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    yield found
    watch.stop()


def test_exit_handler_removes_leftovers_of_a_lost_launcher(launched):
    launched.start("lost")
    launched.until("lost", TrainingStep, lambda event: event.attempt == 1)
    launched.kill("lost")
    assert launched.left("lost", seconds=0)
    launched.report("lost")
    assert launched.left("lost") == []


def _forbid_gpus(cluster):
    hard = {"requests.nvidia.com/gpu": "0"}
    body = {"metadata": {"name": "no-gpus"}, "spec": {"hard": hard}}
    cluster.core.create_namespaced_resource_quota(cluster.namespace, body)


@contextlib.contextmanager
def _room_for_one_pod(launched):
    """Set a quota that fits the launcher and one of two training pods."""
    core, namespace = launched.cluster.core, launched.cluster.namespace
    body = {"metadata": {"name": "small"}, "spec": {"hard": {"requests.memory": "3Gi"}}}
    core.create_namespaced_resource_quota(namespace, body)
    try:
        yield
    finally:
        core.delete_namespaced_resource_quota("small", namespace)


@contextlib.contextmanager
def _labelled(core, label):
    """Label every node for the duration of the context."""
    _patch_nodes(core, {"metadata": {"labels": label}})
    try:
        yield
    finally:
        _patch_nodes(core, {"metadata": {"labels": dict.fromkeys(label)}})


def _patch_nodes(core, change):
    for node in core.list_node().items:
        core.patch_node(node.metadata.name, change)


def _evict(core, metadata):
    """Evict a pod, as a node drain does."""
    name, namespace = metadata.name, metadata.namespace
    core.create_namespaced_pod_eviction(
        name, namespace, {"metadata": {"name": name, "namespace": namespace}}
    )


@contextlib.contextmanager
def _tainted(core):
    """Taint every node against new pods for the duration of the context."""
    _change_taints(core, lambda taints: [*taints, TAINT])
    try:
        yield
    finally:
        _change_taints(
            core, lambda taints: [item for item in taints if item["key"] != TAINT["key"]]
        )


def _change_taints(core, change):
    for node in core.list_node().items:
        taints = [item.to_dict() for item in node.spec.taints or []]
        core.patch_node(node.metadata.name, {"spec": {"taints": change(taints)}})


def _until_it_is_ready(core, seconds=300):
    """Wait for an API server that starts: it answers before it has all that it needs."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(client.ApiException, HTTPError):
            core.api_client.call_api("/readyz", "GET", auth_settings=["BearerToken"])
            return
        time.sleep(1)
    raise AssertionError(f"the API server was not ready after {seconds} s")

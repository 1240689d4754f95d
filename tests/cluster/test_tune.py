"""Steps that drive a study in a pod, its trials as TrainJobs, and the loss of the driver's pod."""

from __future__ import annotations

import contextlib
import json
import time

from kubernetes import client

from steadytrain.components.shared.events.types import TrainingStep
from steadytrain.components.tune.search import STUDY

from support.launched import OUTPUT

RATES = {"training.learning_rate": {"low": 1e-4, "high": 1e-2, "log": True}}
SETTINGS = {
    "training": {"max_steps": 30, "eval_steps": 10, "save_steps": 5, "learning_rate": 1e-3},
    "compute": {"nodes": 1, "pods": {"memory": "1Gi"}},
}
ASHA = {"space": RATES, "pruner": "asha", "min_steps": 10, "budget": {"trials": 3}}
PAIR = {"space": RATES, "pruner": "none", "budget": {"trials": 2, "parallel": 2}}


def begin(launched, study, tune, *, pod="", recovery=None, **compute):
    settings = {
        **SETTINGS,
        "compute": {**SETTINGS["compute"], **compute},
        "recovery": recovery or {},
    }
    return launched.start(study, pod=pod, step="tune", tune=tune, **settings)


def run_of(study, number):
    """The run of a trial, as seen from the folder of the runs."""
    return f"../studies/{study}/trials/{number:04d}/runs/{study}-{number:04d}"


def log_of(launched, study):
    """The log of a study, without what differs between two equal studies."""
    lines = launched.read(f"../studies/{study}/log.jsonl").splitlines()
    records = [json.loads(line) for line in lines if line]
    for record in records:
        for name in ("seconds", "sum", "config"):
            record.pop(name, None)
    return records


def jobs_of(study, namespace):
    found = client.CustomObjectsApi().list_namespaced_custom_object(
        "trainer.kubeflow.org",
        "v1alpha1",
        namespace,
        "trainjobs",
        label_selector=f"{STUDY}={study}",
    )
    return {item["metadata"]["name"] for item in found["items"]}


def left(launched, study, trials):
    return [name for number in range(trials) for name in launched.left(f"{study}-{number:04d}")]


def results(launched, study):
    return json.loads(launched.read(f"../studies/{study}/tuning.json"))


def test_driver_that_is_asked_to_stop_leaves_no_job_of_two_trials_at_once(launched):
    study, cluster = "asked", launched.cluster
    begin(launched, study, PAIR)
    for number in (0, 1):
        launched.until(run_of(study, number), TrainingStep, lambda _: True)
    assert jobs_of(study, cluster.namespace) == {"asked-0000-a1", "asked-0001-a1"}
    cluster.core.delete_namespaced_pod(study, cluster.namespace, grace_period_seconds=60)
    while any(
        pod.metadata.name == study
        for pod in cluster.core.list_namespaced_pod(cluster.namespace).items
    ):
        time.sleep(1)
    assert left(launched, study, 2) == []


def test_study_whose_driver_lost_its_pod_has_the_log_of_an_undisturbed_one(launched):
    begin(launched, "calm", ASHA)
    begin(launched, "lost", ASHA, pod="lost-1")
    launched.until(run_of("lost", 1), TrainingStep, lambda _: True)
    launched.kill("lost-1")
    begin(launched, "lost", ASHA, pod="lost-2")
    for pod in ("calm", "lost-2"):
        phase, log = launched.end(pod, 900)
        assert phase == "Succeeded", log
    assert log_of(launched, "lost") == log_of(launched, "calm")
    assert any(item["kind"] == "promoted" for item in log_of(launched, "calm"))
    assert left(launched, "lost", 3) == left(launched, "calm", 3) == []


def test_too_few_nodes_mean_fewer_trials_at_once(launched):
    study, recovery = "small", {"max_failures_per_class": 1}
    pods = {**SETTINGS["compute"]["pods"], "pending_timeout_seconds": 15}
    with room_for_one_trial(launched.cluster):
        begin(launched, study, PAIR, pods=pods, recovery=recovery)
        phase, log = launched.end(study, 900)
    assert phase == "Succeeded", log
    found = results(launched, study)
    assert (found["trials_completed"], found["trials_failed"]) == (2, 0)
    assert "exceeded quota" in log
    assert "found no room on the cluster" in log
    assert left(launched, study, 2) == []


@contextlib.contextmanager
def room_for_one_trial(cluster):
    """Set a quota that fits the driver and the pod of one trial."""
    body = {"metadata": {"name": "one-trial"}, "spec": {"hard": {"requests.memory": "2Gi"}}}
    cluster.core.create_namespaced_resource_quota(cluster.namespace, body)
    try:
        yield
    finally:
        cluster.core.delete_namespaced_resource_quota("one-trial", cluster.namespace)


def validate(launched, study, *, pod=""):
    """Start the cross-validate step: two folds, two at a time."""
    launched.start(
        study,
        pod=pod,
        step="cross-validate",
        tune={"budget": {"parallel": 2}},
        cross_validation={"folds": 2},
        **SETTINGS,
    )


def predictions(launched, study):
    """The digest of the out-of-fold predictions."""
    return launched.cluster.shell("sha256sum", f"{OUTPUT}/studies/{study}/out-of-fold.parquet")[:64]


def test_folds_train_at_once_and_survive_the_drivers_pod(launched):
    validate(launched, "folds", pod="folds-1")
    for number in (0, 1):
        launched.until(run_of("folds", number), TrainingStep, lambda _: True)
    assert jobs_of("folds", launched.cluster.namespace) == {"folds-0000-a1", "folds-0001-a1"}
    launched.kill("folds-1")
    validate(launched, "folds", pod="folds-2")
    # At the same time, since much of what both do is waiting for pods.
    validate(launched, "quiet")
    for pod in ("folds-2", "quiet"):
        phase, log = launched.end(pod, 900)
        assert phase == "Succeeded", log
    assert "fold 1 held out" in log
    assert predictions(launched, "folds") == predictions(launched, "quiet")
    assert left(launched, "folds", 2) == left(launched, "quiet", 2) == []


def test_trial_sees_no_test_side(launched):
    files = launched.cluster.shell("ls", "-R", f"{OUTPUT}/studies/calm/trials/data")
    assert "train" in files
    assert "test" not in files

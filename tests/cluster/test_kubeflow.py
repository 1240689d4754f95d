"""Runs on a real Kubeflow Pipelines server, at the address in KF_PIPELINES_ENDPOINT.

Pods reach it at STEADYTRAIN_TEST_KFP, by default ml-pipeline in KFP's own namespace.
"""

from __future__ import annotations

import json
import os
import time

import pytest
import yaml
from typer.testing import CliRunner

import steadytrain.pipelines
from steadytrain.components.shared.cluster import Cluster as Client
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.events.types import (
    AttemptStarted,
    Resubmitted,
    StepStarted,
    TrainingStep,
)
from steadytrain.components.shared.kubeflow.connection import connect
from steadytrain.components.shared.kubeflow.variables import HOST_VARIABLE
from steadytrain.components.train.launch.job import TRAIN_JOB
from steadytrain.components.train.launch.naming import PIPELINE_RUN, RUN
from steadytrain.pipelines import cli
from steadytrain.pipelines.server.follow import ENDED

from support.cluster import Cluster
from support.command import wait_for
from support.furniture import furnished, serve_mlflow
from support.launched import CONFIG, SEARCH, TABLE, UNITS, Launched
from support.manifests import build
from support.namespaces import apply, in_namespace, kubectl
from support.tables import shipped

HOST = os.environ.get(HOST_VARIABLE, "")
NAMESPACE = os.environ.get("KFP_NAMESPACE", "kubeflow")
WITHIN = os.environ.get("STEADYTRAIN_TEST_KFP", f"http://ml-pipeline.{NAMESPACE}:8888")

pytestmark = pytest.mark.skipif(
    not (HOST and os.environ.get("KUBECONFIG")), reason=f"{HOST_VARIABLE} names no KFP server"
)


@pytest.fixture(scope="module")
def kubeflow(api, step_image, train_image, tmp_path_factory):
    """Yield `Launched` for KFP's namespace, with everything that the pipeline needs there."""
    objects = in_namespace(build("standalone", (), tmp_path_factory.mktemp("role")), NAMESPACE)
    apply([item for item in objects if item["kind"] in ("Role", "RoleBinding")])
    here = Cluster(NAMESPACE)
    try:
        with furnished(here, step_image):
            serve_mlflow(here, train_image, {HOST_VARIABLE: WITHIN})
            yield Launched(here, train_image)
    finally:
        # Delete these runs first: their pods keep the claim in use.
        server = connect(HOST, NAMESPACE)
        for run in runs(server, ("whole", "lost", "ended", "search", "table")):
            server.runs.run_service_delete_run(run.run_id)
        made = ("pod/mlflow", "pod/keeper", "service/mlflow", "secret/steadytrain")
        names = (*made, "sa/steadytrain", "pvc/steadytrain")
        kubectl("delete", *names, "-n", NAMESPACE, "--wait=false", "--ignore-not-found")


@pytest.fixture(scope="module")
def server(kubeflow):
    return connect(HOST, NAMESPACE)


def submitted(run):
    """Submit a small run and return it."""
    content = {
        **CONFIG,
        "run": run,
        "pipeline": {"fuse": True},
    }
    return steadytrain.pipelines.submit(from_mapping(content), host=HOST, namespace=NAMESPACE)


@pytest.fixture(scope="module")
def undisturbed(kubeflow):
    began = time.time()
    run = submitted("whole")
    outcome = run.wait()
    assert outcome.state == "SUCCEEDED", outcome
    return run, began


def test_compiled_pipeline_ends_with_a_registered_model(kubeflow, undisturbed):
    run, began = undisturbed
    record = yaml.safe_load(kubeflow.read("whole/records/register.json"))
    assert record["version"]
    assert kubeflow.left("whole") == []
    first = kubeflow.events("whole", TrainingStep)[0].time
    pods = kubeflow.cluster.core.list_namespaced_pod(
        NAMESPACE, label_selector=f"{PIPELINE_RUN}={run.run_id}"
    )
    steps = {event.stage: event.time for event in kubeflow.events("whole", StepStarted)}
    print(f"{first - began:.0f} s from submit to the first training step; {len(pods.items)} pods")
    print({stage: round(moment - began) for stage, moment in steps.items()})


def test_run_that_loses_its_train_step_ends_with_the_same_weights(kubeflow, undisturbed, server):
    run = submitted("lost")
    kubeflow.until("lost", TrainingStep, lambda event: event.step > 10)
    delete_steps_pod(kubeflow, run.run_id)
    ended = finished(kubeflow, server, "lost", 900)
    assert ended, states(server, "lost")
    weights = [kubeflow.record(name)["weights_digest"] for name in ("whole", "lost")]
    assert weights[0] == weights[1]
    assert kubeflow.left("lost") == []
    print(kubeflow.classes("lost"))
    print("submitted again:", kubeflow.events("lost", Resubmitted), states(server, "lost"))


def test_tuning_pipeline_trains_its_winner_as_a_job(kubeflow):
    pods = {**CONFIG["compute"]["pods"], "memory": "1Gi"}
    tune = {
        "space": {"training.learning_rate": {"choices": [1e-3, 1e-2]}},
        "pruner": "none",
        "budget": {"trials": 2},
        "seeds": 1,
    }
    content = {
        **CONFIG,
        "run": "search",
        "training": {**CONFIG["training"], "max_steps": 10, "eval_steps": 5},
        "compute": {**CONFIG["compute"], "pods": pods},
        "pipeline": {"fuse": True},
        "tune": tune,
    }
    config = from_mapping(content)
    run = steadytrain.pipelines.submit(config, pipeline="tune", host=HOST, namespace=NAMESPACE)
    outcome = run.wait()
    assert outcome.state == "SUCCEEDED", outcome
    begun = kubeflow.events("search-*", AttemptStarted)
    assert begun
    assert {event.nodes for event in begun} == {2}
    assert yaml.safe_load(kubeflow.read("../studies/search/tuning.json"))["trials_completed"] == 2
    assert yaml.safe_load(kubeflow.read("search-*/records/gate.json"))["compared"] == 2
    assert yaml.safe_load(kubeflow.read("search-*/records/register.json"))["version"]
    assert kubeflow.left("search") == []


def test_search_of_a_table_registers_its_winner(kubeflow):
    kubeflow.write(TABLE, shipped("wine").to_csv(index=False))
    config = from_mapping({**SEARCH, "run": "table", "pipeline": {"fuse": True}})
    run = steadytrain.pipelines.submit(config, pipeline="automl", host=HOST, namespace=NAMESPACE)
    outcome = run.wait()
    assert outcome.state == "SUCCEEDED", outcome
    board = json.loads(kubeflow.read("../studies/table/board.json"))
    assert board["trials"] == board["trials_completed"] == UNITS
    assert board["best_params"].keys() == {"linear"}
    gate = json.loads(kubeflow.read(f"{board['run']}/records/gate.json"))
    assert board["test"]["metrics"][gate["metric"]]["value"] == gate["candidate"]
    assert json.loads(kubeflow.read(f"{board['run']}/records/register.json"))["version"]
    assert "opened once" in kubeflow.read("../studies/table/report.html")
    for number in range(UNITS):
        assert kubeflow.left(f"table-{number:04d}") == []


def test_terminated_run_stops_and_is_not_submitted_again(kubeflow, undisturbed, server):
    run = submitted("ended")
    kubeflow.until("ended", TrainingStep, lambda event: event.step > 10)
    began = time.monotonic()
    server.runs.run_service_terminate_run(run.run_id)
    wait_for(lambda: not jobs(kubeflow, "ended"), 60)
    print(f"no job left {time.monotonic() - began:.0f} s after the termination")
    wait_for(lambda: all(state in ENDED for state in states(server, "ended")), 180)
    assert len(states(server, "ended")) == 1
    assert kubeflow.left("ended") == []
    assert kubeflow.events("ended", Resubmitted) == []


def test_schedule_is_applied_once_paused_and_removed(server, tmp_path, kubeflow):
    file = tmp_path / "schedules.yaml"
    nightly = {
        "name": "tiny",
        "config": "causal-lm",
        "overrides": {"output": "/mnt/steadytrain"},
        "cron": "30 3 * * MON-FRI",
        "time_zone": "Asia/Kolkata",
    }
    declare(file, [nightly])
    assert "created nightly/tiny" in command("apply", file)
    assert "left alone nightly/tiny" in command("apply", file)
    (made,) = server.recurring_runs.recurring_run_service_list_recurring_runs(
        namespace=NAMESPACE
    ).recurring_runs
    assert made.trigger.cron_schedule.cron == "0 0 22 * * 0,1,2,3,4"
    assert made.status == "ENABLED"
    command("pause", "nightly/tiny")
    declare(file, [{**nightly, "cron": "30 4 * * *"}])
    assert "replaced nightly/tiny" in command("apply", file)
    declare(file, [])
    assert "deleted nightly/tiny" in command("apply", file)
    answer = server.recurring_runs.recurring_run_service_list_recurring_runs(namespace=NAMESPACE)
    assert not answer.recurring_runs


def declare(file, schedules):
    content = {"name": "nightly", "experiment": "retraining", "schedules": schedules}
    file.write_text(yaml.safe_dump(content))


def command(verb, *arguments):
    told = CliRunner().invoke(
        cli.app, ["schedule", verb, *map(str, arguments), "--host", HOST, "--namespace", NAMESPACE]
    )
    assert told.exit_code == 0, told.output
    return told.output


def states(server, run):
    """Return the states of all KFP runs with this name, the newest last."""
    return [item.state for item in runs(server, (run,))]


def runs(server, names):
    found = server.runs.run_service_list_runs(
        namespace=NAMESPACE, page_size=100, sort_by="created_at asc"
    )
    return [item for item in found.runs or [] if item.display_name in names]


def finished(kubeflow, server, run, seconds):
    """Return whether all KFP runs with this name ended within the time and one succeeded."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = states(server, run)
        if "SUCCEEDED" in found and all(state in ENDED for state in found):
            return True
        time.sleep(2)
    return False


def delete_steps_pod(kubeflow, run_id):
    """Delete the train step's pod, as if its machine were lost."""
    core = kubeflow.cluster.core
    pods = core.list_namespaced_pod(NAMESPACE, label_selector=f"{PIPELINE_RUN}={run_id}").items
    (pod,) = (
        pod.metadata.name
        for pod in pods
        if pod.status.phase == "Running" and "container-impl" in pod.metadata.name
    )
    core.delete_namespaced_pod(pod, NAMESPACE)


def jobs(kubeflow, run):
    client = Client(kubeflow.cluster.core.api_client, NAMESPACE)
    return client.list(TRAIN_JOB, {RUN: run})

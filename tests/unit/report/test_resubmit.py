"""A run that lost a step is submitted again. A terminated run never is.

Kubeflow Pipelines and the cluster's API are small servers that answer like the real ones.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest
from kfp_server_api import RunServiceApi

import steadytrain.pipelines
from steadytrain.components.report.facts import gather
from steadytrain.components.report.step import resubmit_lost
from steadytrain.components.report.step import run as report
from steadytrain.components.report.story import outcome
from steadytrain.components.shared import retry
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import Resubmitted, StepFailed, Warned
from steadytrain.components.shared.lease import hold
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.train.launch import own_pod, removal
from steadytrain.components.train.launch.naming import FOLDER, PIPELINE_RUN, run_labels
from steadytrain.components.train.recovery import resubmit as module
from steadytrain.pipelines.server import submission

from support import api_server, kfp_server
from support.compiled import compiled_once
from support.written_run import Writer

POD, WORKFLOW = "report-1", "steadytrain-finetune-abcde"


@pytest.fixture
def api(monkeypatch):
    """The cluster's API server, with the report's own pod and the workflow that owns it."""
    owner = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": WORKFLOW, "uid": "1"}
    spec = {"containers": [{"name": "main", "image": "step:1"}]}
    with api_server.serving() as (server, cluster):
        metadata = {"name": POD, "labels": {}, "ownerReferences": [owner]}
        server.put("pods", {"metadata": metadata, "spec": spec})
        server.put("workflows", {"metadata": {"name": WORKFLOW}, "spec": {}})
        for place in (module, removal):
            monkeypatch.setattr(place, "this_pod_name", lambda: POD)
            monkeypatch.setattr(place, "connect", lambda: cluster)
        monkeypatch.setattr(own_pod, "this_pod_name", lambda: POD)
        yield server


@pytest.fixture
def kfp(monkeypatch):
    with kfp_server.serving() as server:
        monkeypatch.setenv("KF_PIPELINES_ENDPOINT", server.address)
        yield server


@pytest.fixture
def lost(api, kfp, make_config, monkeypatch):
    """A submitted run whose train step was killed: the files it left behind, and its KFP run."""
    monkeypatch.setattr(submission, "compile_pipeline", compiled_once)
    config = make_config(output="/mnt/steadytrain", recovery={"resubmit": 2})
    submitted = steadytrain.pipelines.submit(config, host=kfp.address)
    written = Writer(make_config(recovery={"resubmit": 2, "lease_seconds": 1}))
    written.again()
    written.start_step("train")
    return written, kfp.things["runs"][submitted.run_id]


def again(lost):
    written, run = lost
    return resubmit_lost(written.config, run["run_id"])


@pytest.mark.slow
def test_same_pipeline_is_started_with_the_same_parameters(kfp, lost):
    told = again(lost)
    first, second = kfp.all("runs")
    assert isinstance(told, Resubmitted)
    assert (told.kfp_run, told.number, told.limit) == (second["run_id"], 1, 2)
    for same in ("display_name", "experiment_id", "pipeline_version_reference", "runtime_config"):
        assert second[same] == first[same]
    assert first["run_id"] in second["description"]


@pytest.mark.slow
def test_page_shows_it(kfp, lost):
    written, run = lost
    page = report(written.config, run["run_id"]).read_text()
    new = kfp.all("runs")[-1]["run_id"]
    assert outcome(gather(written.workspace)).state == "resubmitted"
    assert f"lost train. It was resubmitted as Kubeflow Pipelines run {new}" in page

    written.clock = datetime.now(UTC).timestamp() + 1
    written.again()
    assert outcome(gather(written.workspace)).state == "unfinished", "the new run is active"


def test_asterisk_stands_for_the_continued_run(kfp, lost):
    _, run = lost
    run["runtime_config"]["parameters"]["run"] = "nightly-*"
    again(lost)
    continued = kfp.all("runs")[-1]["runtime_config"]["parameters"]["run"]
    assert continued == f"nightly-{run['run_id'][:8]}"


def test_exit_handler_started_twice_submits_once(kfp, lost):
    again(lost)
    assert again(lost) is None
    assert len(kfp.all("runs")) == 2


class Killed(BaseException):
    """Ends the exit handler as SIGKILL does: nothing after it runs."""


@pytest.mark.parametrize("request_reached", [False, True])
def test_exit_handler_that_dies_while_it_submits_leaves_the_rest_to_the_next(
    kfp, lost, monkeypatch, request_reached
):
    def dies(api, **content):
        if request_reached:
            create(api, **content)
        raise Killed

    create = RunServiceApi.run_service_create_run
    with monkeypatch.context() as patch:
        patch.setattr(RunServiceApi, "run_service_create_run", dies)
        with pytest.raises(Killed):
            again(lost)
    assert len(kfp.all("runs")) == 1 + request_reached

    told = again(lost)

    assert (told.number, told.kfp_run) == (1, kfp.all("runs")[-1]["run_id"])
    assert again(lost) is None
    assert len(kfp.all("runs")) == 2


def test_exit_handlers_at_the_same_time_submit_once(kfp, lost):
    with ThreadPoolExecutor(4) as pool:
        told = list(pool.map(lambda _: again(lost), range(4)))
    assert len(kfp.all("runs")) == 2
    assert [isinstance(item, Resubmitted) for item in told].count(True) == 1


def test_resubmissions_without_a_new_checkpoint_are_limited(kfp, lost):
    written, run = lost
    for number in (1, 2):
        told = again((written, run))
        assert told.number == number
        run = kfp.things["runs"][told.kfp_run]
    gave_up = again((written, run))
    assert isinstance(gave_up, Warned)
    assert "2 times without a new checkpoint" in gave_up.message
    assert again((written, run)) is None
    written.attempt(1, last=120, max_steps=400, save_every=100, outcome="failed")
    told = again((written, kfp.things["runs"][kfp_again(kfp, run)]))
    assert told.number == 1, "a new checkpoint gives it its chances back"


def test_unreadable_note_counts_as_a_resubmission(make_config):
    """It may be for the same step. One resubmission too few is better than an endless loop."""
    written = Writer(make_config(recovery={"resubmit": 2}))
    written.again()
    folder = written.workspace.resubmitted
    folder.mkdir(parents=True)
    for number, damage in enumerate([b"", b"{", b"[]", b'{"time": 1}', b"\xff", b"[" * 9999], 1):
        (folder / f"damaged-{number}.json").write_bytes(damage)
        notes, name = LocalStorage(folder), f"job-{number}.json"
        note = module._note(notes, name, 0)
        assert (note.number, note.state) == (2 * number, "asked")
        module._write(notes, name, note)


def kfp_again(kfp, run):
    """Submit the run again by hand."""
    content = {key: run[key] for key in ("display_name", "experiment_id", "runtime_config")}
    content["pipeline_version_reference"] = run["pipeline_version_reference"]
    return kfp.create("runs", content)["run_id"]


@pytest.mark.parametrize(
    "spec", [{"activeDeadlineSeconds": 0}, {"shutdown": "Terminate"}, {"shutdown": "Stop"}]
)
def test_terminated_workflow_stays_terminated(api, kfp, lost, spec):
    api.put("workflows", {"metadata": {"name": WORKFLOW}, "spec": spec})
    assert again(lost) is None
    assert len(kfp.all("runs")) == 1


def test_jobs_of_a_terminated_run_are_removed_at_once(api, lost):
    """They are removed even if the lease is still held. Jobs from another KFP run of it stay."""
    written, run = lost
    recovery = written.config.recovery.model_copy(update={"lease_seconds": 600})
    config = written.config.model_copy(update={"recovery": recovery})
    attempts = written.workspace.attempts
    for name, started_by in (("stdlib-lm-1-a1", run["run_id"]), ("stdlib-lm-1-a2", "another")):
        labels = run_labels("stdlib-lm-1") | {PIPELINE_RUN: started_by}
        marks = {FOLDER: str(attempts / "0001")}
        api.put("trainjobs", {"metadata": {"name": name, "labels": labels, "annotations": marks}})
    api.put("workflows", {"metadata": {"name": WORKFLOW}, "spec": {"activeDeadlineSeconds": 0}})
    with hold(LocalStorage(written.workspace.lease), run_id="stdlib-lm-1", seconds=600):
        report(config, run["run_id"])
    assert api.names("trainjobs") == ["stdlib-lm-1-a2"]


def holder_in(api, monkeypatch, job):
    """Make the supervisor that holds the run a pod of a pipeline run."""
    monkeypatch.setattr("socket.gethostname", lambda: "train-pod")
    labels = {PIPELINE_RUN: job}
    api.put("pods", {"metadata": {"name": "train-pod", "labels": labels}, "spec": {}})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "labels", "how"),
    [
        ({"activeDeadlineSeconds": 0}, {}, "in Kubeflow Pipelines"),
        ({"shutdown": "Terminate"}, {}, "in Argo (Terminate)"),
        (
            {"shutdown": "Stop"},
            {"workflows.argoproj.io/actor-email": "ann.at.example.test"},
            "in Argo (Stop), by ann@example.test",
        ),
    ],
)
def test_terminated_run_says_so_although_its_lease_has_not_expired(
    api, kfp, lost, monkeypatch, spec, labels, how
):
    written, run = lost
    holder_in(api, monkeypatch, run["run_id"])
    api.put("workflows", {"metadata": {"name": WORKFLOW, "labels": labels}, "spec": spec})
    lease = LocalStorage(written.workspace.lease)
    with hold(lease, run_id=written.workspace.run_id, seconds=600):
        report(written.config, run["run_id"])
        standing = outcome(gather(written.workspace, running=True))
    assert standing.state == "terminated"
    assert standing.sentence.endswith(f"terminated in train: {how}.")
    assert len(kfp.all("runs")) == 1


def test_termination_of_a_refused_second_run_is_not_the_runs_own(api, lost, monkeypatch):
    written, run = lost
    holder_in(api, monkeypatch, "another")
    api.put("workflows", {"metadata": {"name": WORKFLOW}, "spec": {"activeDeadlineSeconds": 0}})
    lease = LocalStorage(written.workspace.lease)
    with hold(lease, run_id=written.workspace.run_id, seconds=600):
        report(written.config, run["run_id"])
        assert outcome(gather(written.workspace, running=True)).state == "running"


@pytest.mark.parametrize("state", ["CANCELING", "CANCELED"])
def test_run_that_reports_its_termination_stays_terminated(kfp, lost, state):
    lost[1]["state"] = state
    assert again(lost) is None
    assert len(kfp.all("runs")) == 1


def test_run_that_once_reported_its_termination_stays_terminated(kfp, lost):
    """As on a real server: the next report of the workflow sets the state to RUNNING again."""
    history = [{"state": state} for state in ("PENDING", "RUNNING", "CANCELING", "RUNNING")]
    lost[1]["state_history"] = history
    assert again(lost) is None
    assert len(kfp.all("runs")) == 1


def test_deleted_run_stays_deleted(api, kfp, lost):
    del api.objects["workflows", WORKFLOW]
    assert again(lost) is None
    assert len(kfp.all("runs")) == 1


def test_unknown_termination_is_not_resubmitted(api, kfp, lost, monkeypatch):
    monkeypatch.setattr("steadytrain.components.shared.retry.AWAY_SECONDS", 0.0)
    api.away = True
    told = again(lost)
    assert "not resubmitted: the cluster's API server" in told.message
    assert len(kfp.all("runs")) == 1


def test_abandoned_failure_is_not_resubmitted(kfp, lost):
    written, _ = lost
    written.fail("train", "TrainingFailed", "a user's bug")
    assert again(lost) is None
    assert len(kfp.all("runs")) == 1


@pytest.mark.slow
def test_step_that_a_server_was_down_for_is_submitted_again(kfp, lost):
    written, run = lost
    said = {"stage": "train", "error": "TrackingError", "message": "Connection refused"}
    written.emit("train", StepFailed, **said, passing=True)
    report(written.config, run["run_id"])
    assert len(kfp.all("runs")) == 2
    assert outcome(gather(written.workspace)).state == "resubmitted"


def test_step_stopped_by_sigterm_counts_as_lost(kfp, lost):
    """A drained node asks a step to stop. So does a termination, but its workflow shows that."""
    lost[0].fail("train", "Stopped", "asked to stop")
    assert isinstance(again(lost), Resubmitted)


def test_run_that_is_active_elsewhere_is_not_resubmitted(kfp, lost):
    written, _ = lost
    lease = LocalStorage(written.workspace.lease)
    with hold(lease, run_id=written.workspace.run_id, seconds=60):
        assert again(lost) is None
    assert len(kfp.all("runs")) == 1


@pytest.mark.parametrize("status", [401, 403, 503])
@pytest.mark.parametrize("call", ["GET /apis/v2beta1/healthz", "GET /apis/v2beta1/runs/"])
def test_server_that_restarts_is_waited_for(kfp, lost, monkeypatch, call, status):
    """An exit handler runs once. If it does not submit the run, nothing else will."""
    monkeypatch.setattr(retry, "DELAYS", (0.01, 8.0))
    kfp.fail_next = [(call, status)] * 4
    assert isinstance(again(lost), Resubmitted)
    assert len(kfp.all("runs")) == 2


@pytest.mark.parametrize("status", [401, 403, 503])
def test_temporarily_rejected_start_is_retried(kfp, lost, monkeypatch, status):
    monkeypatch.setattr(retry, "DELAYS", (0.01, 8.0))
    kfp.fail_next = [("POST /apis/v2beta1/runs", status)] * 2
    assert isinstance(again(lost), Resubmitted)
    assert len(kfp.all("runs")) == 2


def test_lost_response_starts_no_second_run(kfp, lost, monkeypatch):
    monkeypatch.setattr(retry, "DELAYS", (0.01, 8.0))
    kfp.lose_next = ["POST /apis/v2beta1/runs"]
    told = again(lost)
    _, second = kfp.all("runs")
    assert told.kfp_run == second["run_id"]


@pytest.mark.slow
def test_server_that_rejects_a_request_is_reported(kfp, lost, monkeypatch):
    monkeypatch.setattr(retry, "DENIED_SECONDS", 0.0)
    kfp.token = "somebody-elses"
    told = again(lost)
    assert isinstance(told, Warned)
    assert "not resubmitted" in told.message
    assert "401" in told.message
    page = report(lost[0].config, lost[1]["run_id"]).read_text()
    assert "not resubmitted" in page


@pytest.mark.parametrize("off", ["by the configuration", "outside of a cluster", "by hand"])
def test_no_server_is_contacted_if_resubmission_is_off(kfp, lost, monkeypatch, off):
    written, run = lost
    before, job = len(kfp.requests), run["run_id"]
    if off == "by the configuration":
        recovery = written.config.recovery.model_copy(update={"resubmit": 0})
        written.config = written.config.model_copy(update={"recovery": recovery})
    elif off == "outside of a cluster":
        monkeypatch.setattr(module, "this_pod_name", lambda: "")
    else:
        job = ""
    assert resubmit_lost(written.config, job) is None
    assert len(kfp.requests) == before
    assert not [item for item in read_events(written.workspace.events) if "resub" in item.name]

"""Submit a run, follow it, and report on it. The server is a stub that refuses as KFP does."""

from __future__ import annotations

import functools
import io
import itertools
import json

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

import steadytrain.pipelines
from steadytrain.components.shared.config import load
from steadytrain.components.shared.errors import BadInput, ConfigError, ServerError
from steadytrain.components.shared.kubeflow.connection import connect
from steadytrain.components.shared.kubeflow.listing import pages
from steadytrain.pipelines import cli, submit_command
from steadytrain.pipelines.server import follow as following
from steadytrain.pipelines.server import submission
from steadytrain.pipelines.server.follow import Step, follow
from steadytrain.pipelines.server.upload import find_or_make, upload

from support.compiled import compiled_once

PLACE = "output=/mnt/shared"


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(following.time, "sleep", lambda _: None)
    monkeypatch.setattr(submission, "compile_pipeline", compiled_once)


@pytest.fixture
def submitted(kfp):
    return steadytrain.pipelines.submit("causal-lm", [PLACE], host=kfp.address)


def command(*arguments):
    return CliRunner().invoke(cli.app, [*map(str, arguments)])


def test_configuration_is_sent_as_one_parameter(kfp, submitted):
    (run,) = kfp.all("runs")
    stated = load("causal-lm", [PLACE])
    given = run["runtime_config"]["parameters"]
    assert given.keys() == {"config", "output"}
    assert given["output"] == stated.output
    assert load(given["config"]).digest() == stated.digest()
    assert load(given["config"]).run == stated.run_id == run["display_name"]
    assert submitted.url == f"{kfp.address}/#/runs/details/{run['run_id']}"


def test_run_belongs_to_the_callers_span(kfp, monkeypatch):
    span = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    monkeypatch.setenv("TRACEPARENT", span)
    steadytrain.pipelines.submit("causal-lm", [PLACE], host=kfp.address)
    (run,) = kfp.all("runs")
    sent = load(run["runtime_config"]["parameters"]["config"])
    assert sent.observability.traceparent == span
    assert sent.run == run["display_name"] == load("causal-lm", [PLACE]).run_id


def test_studies_of_one_configuration_are_submitted_under_names_of_their_own():
    def name(high):
        space = {"training.learning_rate": {"low": 1e-5, "high": high}}
        config = load("causal-lm", {"output": "/mnt/shared", "tune.space": space})
        sent = submission.Submission.of(config, pipeline="tune").parameters["config"]
        assert load(sent).tune == config.tune
        return load(sent).run

    assert name(1e-3) == name(1e-3) != name(1e-2)


def test_cross_validation_is_submitted_under_the_name_of_its_study():
    def name(folds):
        settings = {"output": "/mnt/shared", "training.max_steps": 20}
        config = load("causal-lm", settings | {"cross_validation.folds": folds})
        sent = submission.Submission.of(config, pipeline="cross-validate").config
        return sent.run

    assert name(3) == name(3) != name(4)
    space = {"tune.space": {"training.learning_rate": {"low": 1e-5, "high": 1e-3}}}
    config = load("causal-lm", {"output": "/mnt/shared", "training.max_steps": 20} | space)
    with pytest.raises(BadInput, match=r"tune\.space"):
        submission.Submission.of(config, pipeline="cross-validate")


def test_study_without_a_space_is_rejected_before_anything_is_sent(kfp):
    with pytest.raises(BadInput, match=r"tune\.space"):
        steadytrain.pipelines.submit("causal-lm", [PLACE], pipeline="tune", host=kfp.address)
    assert not kfp.all("pipelines")


def test_uploaded_version_runs_in_the_configured_experiment(kfp, submitted):
    (experiment,), (version,), (pipeline,) = map(kfp.all, ("experiments", "versions", "pipelines"))
    (run,) = kfp.all("runs")
    assert experiment["display_name"] == "steadytrain"
    assert run["experiment_id"] == experiment["experiment_id"]
    assert pipeline["display_name"] == "steadytrain-finetune"
    reference = run["pipeline_version_reference"]
    assert reference == {key: version[key] for key in ("pipeline_id", "pipeline_version_id")}
    assert "comp-preprocess" in next(yaml.safe_load_all(version["file"]))["components"]


def test_same_content_is_uploaded_once(kfp, submitted):
    again = steadytrain.pipelines.submit("chat", [PLACE], host=kfp.address)
    assert submitted.version.uploaded
    assert not again.version.uploaded
    assert again.version.version_id == submitted.version.version_id
    assert [len(kfp.all(kind)) for kind in ("pipelines", "versions", "experiments", "runs")] == [
        1,
        1,
        1,
        2,
    ]


def test_changed_content_is_a_new_pipeline_version(kfp, tmp_path):
    server, path = connect(kfp.address), tmp_path / "pipeline.yaml"
    content = {"pipelineInfo": {"name": "p"}, "root": {"dag": {"tasks": {}}}}
    path.write_text(yaml.safe_dump(content))
    first = upload(server, path)
    path.write_text("# only a comment\n" + yaml.safe_dump(content, default_flow_style=True))
    assert upload(server, path).version_id == first.version_id
    path.write_text(yaml.safe_dump({**content, "schemaVersion": "2.1.0"}))
    second = upload(server, path)
    assert second.uploaded
    assert (second.pipeline_id, second.name) != (first.pipeline_id, first.name)
    assert second.pipeline_id == first.pipeline_id


def test_concurrent_creation_is_not_a_failure(kfp, submitted):
    api = connect(kfp.address).experiments
    answers = iter([None, "theirs"])  # another client creates it between our lookup and our attempt
    make = functools.partial(
        api.experiment_service_create_experiment, experiment={"display_name": "steadytrain"}
    )
    assert find_or_make(lambda: next(answers), make) == ("theirs", False)
    with pytest.raises(ServerError, match="already exists"):
        find_or_make(lambda: None, make)


def test_rejection_is_reported_in_the_servers_words(kfp):
    with pytest.raises(ServerError, match="length cannot exceed 128") as raised:
        steadytrain.pipelines.submit("causal-lm", [PLACE], host=kfp.address, experiment="x" * 200)
    assert raised.value.status == 400
    assert kfp.all("runs") == []


def test_options_reach_the_server(kfp):
    steadytrain.pipelines.submit(
        "causal-lm",
        [PLACE],
        host=kfp.address,
        experiment="nightly",
        pipeline_root="s3://bucket/root",
        service_account="trainer",
    )
    (run,) = kfp.all("runs")
    assert run["service_account"] == "trainer"
    assert run["runtime_config"]["pipeline_root"] == "s3://bucket/root"
    assert kfp.all("experiments")[0]["display_name"] == "nightly"


def test_multi_user_server_uses_namespaces(kfp):
    kfp.multi_user = True
    with pytest.raises(BadInput, match="no namespace is given"):
        steadytrain.pipelines.submit("causal-lm", [PLACE], host=kfp.address)
    steadytrain.pipelines.submit("causal-lm", [PLACE], host=kfp.address, namespace="team-a")
    assert kfp.all("experiments")[0]["namespace"] == "team-a"


def test_single_user_server_gets_no_namespace(kfp):
    steadytrain.pipelines.submit("causal-lm", [PLACE], host=kfp.address, namespace="kubeflow")
    assert "namespace" not in kfp.all("experiments")[0]


def test_unsuitable_configuration_is_rejected_before_connecting():
    with pytest.raises(BadInput, match="pods do not share"):
        steadytrain.pipelines.submit("causal-lm", host="http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"training\.max_stps"):
        steadytrain.pipelines.submit("causal-lm", ["training.max_stps=1"])
    with pytest.raises(ConfigError, match="contains a secret"):
        steadytrain.pipelines.submit("causal-lm", ["data.source=[https://me:secret@example.test]"])


def test_lists_are_read_to_the_last_page(kfp):
    server, kfp.page_size = connect(kfp.address), 2
    for number in range(5):
        content = {"display_name": f"e{number}"}
        server.experiments.experiment_service_create_experiment(experiment=content)
    found = pages(server.experiments.experiment_service_list_experiments, "experiments")
    assert [item.display_name for item in found] == [f"e{number}" for number in range(5)]


@pytest.mark.parametrize("call", ["experiments", "pipelines", "runs", "recurring_runs"])
def test_list_that_repeats_its_pages_ends_with_an_error(kfp, call):
    server, kfp.page_size, kfp.repeats = connect(kfp.address), 2, True
    kind = call.replace("_", "")
    kfp.things[kind] = {str(number): {"display_name": f"e{number}"} for number in range(7)}
    api = getattr(server, call)
    lists = getattr(
        api, f"{call.removesuffix('s')}_service_list_{call}".replace("_runs_s", "_run_s")
    )
    begun = itertools.islice(pages(lists, call), 20)
    with pytest.raises(ServerError, match=f"repeats a page of its {call.replace('_', ' ')}"):
        list(begun)


SCRIPT = [
    [("root-driver", "RUNNING")],
    [("root", "RUNNING"), ("preprocess-driver", "SUCCEEDED"), ("preprocess", "RUNNING")],
    [("preprocess", "RUNNING"), ("executor", "RUNNING"), ("executor(0)", "FAILED")],
    [("steadytrain-finetune-x7k2p", "RUNNING"), ("preprocess", "RUNNING")],
    [("preprocess", "SUCCEEDED"), ("train", "PENDING")],
]


def test_watching_reports_each_step_change(kfp, submitted):
    kfp.script = [*SCRIPT, [("preprocess", "SUCCEEDED"), ("train", "FAILED"), ("run", "FAILED")]]
    seen = []
    outcome = submitted.wait(lambda steps: seen.append({k: v.state for k, v in steps.items()}))
    assert seen == [
        {"preprocess": "RUNNING"},
        {"preprocess": "SUCCEEDED", "train": "PENDING"},
        {"preprocess": "SUCCEEDED", "train": "FAILED"},
    ]
    assert not outcome.succeeded
    assert outcome.steps["preprocess"].seconds == pytest.approx(4)


@pytest.mark.parametrize("state", ["SUCCEEDED", "FAILED", "CANCELED", "SKIPPED"])
def test_watching_ends_with_every_final_state(kfp, submitted, state):
    kfp.script = [[("run", state)]]
    outcome = submitted.wait()
    assert outcome.state == state
    assert outcome.succeeded == (state in ("SUCCEEDED", "SKIPPED"))


def test_temporarily_unavailable_server_is_polled_again(kfp, submitted):
    kfp.fail_next = [("GET /apis/v2beta1/runs/", 503)] * 12
    kfp.script = [[("run", "SUCCEEDED")]]
    assert submitted.wait().succeeded


def test_deleted_run_ends_watching(kfp, submitted):
    kfp.things["runs"].clear()
    with pytest.raises(ServerError, match="not found"):
        submitted.wait()


@pytest.mark.parametrize("status", [401, 403])
def test_temporary_denial_does_not_end_watching(kfp, submitted, status):
    """A server that restarts denies everything until it has read tokens and roles."""
    kfp.fail_next = [("GET /apis/v2beta1/runs", status)] * 4
    kfp.script = [[("run", "RUNNING")], [("run", "SUCCEEDED")]]
    assert follow(submitted.server, submitted.run_id, (), lambda _: None).succeeded
    assert kfp.fail_next == []


@pytest.mark.parametrize("status", [401, 403])
def test_lasting_denial_ends_watching(kfp, submitted, status):
    kfp.fail_next = [("GET /apis/v2beta1/runs", status)] * 4
    with pytest.raises(ServerError, match=str(status)):
        follow(submitted.server, submitted.run_id, (), lambda _: None, denied_seconds=0)
    assert len(kfp.fail_next) == 3


def test_unavailable_server_ends_watching(kfp, submitted):
    kfp.fail_next = [("GET /apis/v2beta1/runs/", 503)] * 12
    with pytest.raises(ServerError, match="503"):
        follow(submitted.server, submitted.run_id, (), lambda _: None, patience_seconds=0)


def test_command_shows_where_it_runs(kfp):
    done = command("submit", "causal-lm", "--set", PLACE, "--host", kfp.address)
    assert done.exit_code == 0
    (run,) = kfp.all("runs")
    assert f"{kfp.address}/#/runs/details/{run['run_id']}" in done.stdout
    assert "(uploaded)" in done.stdout


def test_json_output_is_one_object(kfp):
    kfp.script = [*SCRIPT, [("preprocess", "SUCCEEDED"), ("train", "FAILED"), ("run", "FAILED")]]
    line = ("submit", "causal-lm", "--set", PLACE, "--host", kfp.address, "--run", "mine", "--json")
    started = json.loads(command(*line).stdout)
    assert (started["run"], started["uploaded"], started["state"]) == ("mine", True, None)
    done = command(*line, "--wait")
    told = json.loads(done.stdout)
    assert (done.exit_code, told["state"], told["steps"]["train"]) == (1, "FAILED", "FAILED")
    assert told.keys() == started.keys()


@pytest.mark.parametrize(("state", "code"), [("SUCCEEDED", 0), ("FAILED", 1), ("CANCELED", 1)])
def test_waiting_exits_with_the_runs_outcome(kfp, state, code):
    kfp.script = [*SCRIPT, [("preprocess", "SUCCEEDED"), ("train", state), ("run", state)]]
    done = command("submit", "causal-lm", "--set", PLACE, "--host", kfp.address, "--wait")
    assert done.exit_code == code
    assert done.stdout.count("preprocess: running") == 1
    assert f"preprocess: succeeded (4 s)\ntrain: pending\ntrain: {state.lower()}" in done.stdout
    assert ("failed in train" in done.stderr) == (state == "FAILED")


def test_terminal_gets_a_table(monkeypatch):
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=80)
    monkeypatch.setattr("rich.console.Console", lambda: console)
    with submit_command._view() as show:
        show({"preprocess": Step("SUCCEEDED", 4.0), "train": Step("RUNNING", 2.0)})
    assert "preprocess" in written.getvalue()
    assert "succeeded (4 s)" in written.getvalue()


def test_ctrl_c_leaves_the_run_alone(kfp, submitted, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(following.time, "sleep", interrupted)
    done = command("submit", "causal-lm", "--set", PLACE, "--host", kfp.address, "--wait")
    assert done.exit_code == 130
    assert "the run continues" in done.stderr
    assert not [path for path in kfp.writes() if "terminate" in path]


def test_dry_run_contacts_no_server(kfp, monkeypatch):
    monkeypatch.setenv("KF_PIPELINES_ENDPOINT", kfp.address)
    done = command("submit", "causal-lm", "--set", PLACE, "--experiment", "e", "--dry-run")
    assert done.exit_code == 0
    assert kfp.requests == []
    _, _, shown = done.stdout.partition("config =\n")
    assert load(shown).digest() == load("causal-lm", [PLACE]).digest()


def test_nothing_secret_is_sent_or_shown(kfp, monkeypatch):
    kfp.token = "header." + "x" * 40
    monkeypatch.setenv("KFP_EXISTING_TOKEN", kfp.token)
    monkeypatch.setenv("KFP_COOKIE", "authservice_session=abcdef")
    done = command("submit", "causal-lm", "--set", PLACE, "--host", kfp.address)
    assert done.exit_code == 0
    assert {header["Cookie"] for header in kfp.headers} == {"authservice_session=abcdef"}
    kept = json.dumps(kfp.things) + done.output
    assert kfp.token not in kept
    assert "abcdef" not in kept

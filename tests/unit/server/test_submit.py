"""Submit a run, follow it, and report on it. The server is a stub that refuses as KFP does."""

from __future__ import annotations

import functools
import io
import itertools
import json
from contextlib import nullcontext

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

import steadytrain.pipelines
from steadytrain.components.report.sentences import as_line
from steadytrain.components.report.story import RunSummary
from steadytrain.components.shared.config import load
from steadytrain.components.shared.errors import BadInput, ConfigError, ServerError
from steadytrain.components.shared.events.types import StepFailed
from steadytrain.components.shared.kubeflow.connection import connect
from steadytrain.components.shared.pagination import pages
from steadytrain.components.train.launch.naming import PIPELINE_RUN, RUN
from steadytrain.components.train.recovery.resubmit import describes
from steadytrain.pipelines import cli, submit_commands
from steadytrain.pipelines.server import follow as following
from steadytrain.pipelines.server import submission
from steadytrain.pipelines.server.follow import Step, follow
from steadytrain.pipelines.server.submission import find_or_make, upload

from support import api_server
from support.compiled import compiled_once
from support.kubernetes_server import kubernetes_server, node

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


def test_search_is_submitted_with_its_task_under_the_name_of_its_study(tmp_path):
    rows = "".join(f"{number},{'ab'[number % 2]}\n" for number in range(40))
    (tmp_path / "table.csv").write_text(f"x,kind\n{rows}")

    def sent(*more):
        sets = [f"output={tmp_path}", f"data.source=[{tmp_path}/table.csv]", "data.target=kind"]
        return submission.Submission.of("", [*sets, *more], pipeline="automl")

    plain, fast = sent(), sent("automl.quality=fast")
    assert plain.config.data.task == "tabular_classification"
    assert plain.config.run == sent().config.run != fast.config.run
    assert load(plain.parameters["config"]).run == plain.config.run
    with pytest.raises(BadInput, match=r"data\.task is missing, and the data cannot be read here"):
        sent(f"data.source=[{tmp_path}/nothing.csv]")


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
    again = steadytrain.pipelines.submit(
        "chat", [PLACE, "data.source=[hub:chats]"], host=kfp.address
    )
    assert submitted.version.uploaded
    assert not again.version.uploaded
    assert again.version.version_id == submitted.version.version_id
    assert [len(kfp.all(kind)) for kind in ("pipelines", "versions", "experiments", "runs")] == [
        1,
        1,
        1,
        2,
    ]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("data.source", ["tickets.txt"]),
        ("data.source", ["s3://bucket/a", "/home/me/tickets.txt"]),
        ("data.source", ["/mnt/steadytrain/../tickets.txt"]),
        ("model.tokenizer", "~/model"),
        ("recovery.checkpoints", "checkpoints"),
    ],
)
def test_path_that_pods_do_not_share_is_rejected_by_name(field, value, kfp):
    with pytest.raises(ConfigError) as caught:
        steadytrain.pipelines.submit("causal-lm", {"output": "/mnt/shared", field: value})
    (problem,) = caught.value.problems
    assert problem.field == field
    assert problem.value == repr(value[-1] if isinstance(value, list) else value)
    assert "/mnt/steadytrain" in problem.remedy
    assert not kfp.all("pipelines")


@pytest.mark.parametrize(
    "address", ["/mnt/steadytrain/a", "/mnt/shared/a", "s3://bucket/a", "hub:a", "package:json"]
)
def test_address_that_pods_share_is_submitted(address):
    settings = {"output": "/mnt/shared", "data.source": [address]}
    assert submission.Submission.of("causal-lm", settings).config.data.source == [address]


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
    known = submitted.server, submitted.run_id
    assert follow(*known, (), lambda _: None, poll_seconds=0.01).succeeded
    assert kfp.fail_next == []


def test_deleted_run_ends_watching(kfp, submitted):
    kfp.things["runs"].clear()
    with pytest.raises(ServerError, match="not found"):
        submitted.wait()


@pytest.mark.slow
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
        follow(submitted.server, submitted.run_id, (), lambda _: None, away_seconds=0)


def test_command_shows_where_it_runs(kfp):
    done = command("submit", "causal-lm", "--set", PLACE, "--host", kfp.address)
    assert done.exit_code == 0
    (run,) = kfp.all("runs")
    assert f"{kfp.address}/#/runs/details/{run['run_id']}" in done.stdout
    assert "(uploaded)" in done.stdout


def test_address_without_pages_gives_no_link(kfp):
    kfp.pages = False
    done = command("submit", "causal-lm", "--set", PLACE, "--host", kfp.address)
    assert done.exit_code == 0
    assert "link" not in done.stdout


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


def story(kfp, **told):
    """Put a story into the log of the report's pod."""
    kfp.logs["report-pod"] = f"KFP's launcher\n{as_line(RunSummary(**told))}\nmore\n"


def test_waiting_ends_with_the_runs_own_story(kfp):
    failure = StepFailed(
        stage="preprocess", error="DataError", message="no records", remedy="add some"
    )
    story(kfp, state="failed", sentence="x failed in preprocess.", failure=failure)
    kfp.script = [[("preprocess", "FAILED"), ("report", "SUCCEEDED"), ("run", "FAILED")]] * 2
    line = ("submit", "causal-lm", "--set", PLACE, "--host", kfp.address, "--wait")
    done = command(*line)
    assert done.exit_code == 1
    for words in ("x failed in preprocess.", "DataError: no records", "fix: add some"):
        assert words in done.stderr
    told = json.loads(command(*line, "--json").stdout)
    assert told["summary"] == "x failed in preprocess."
    assert told["failure"]["error"] == "DataError"


@pytest.mark.slow
def test_run_without_new_data_says_so(kfp):
    story(kfp, state="unchanged", sentence="Nothing was trained. Nothing new.")
    kfp.script = [[("detect-change", "SUCCEEDED"), ("report", "SUCCEEDED"), ("run", "SUCCEEDED")]]
    line = ("--set", PLACE, "--host", kfp.address, "--pipeline", "retrain", "--wait")
    done = command("submit", "causal-lm", *line)
    assert done.exit_code == 0
    assert "Nothing was trained. Nothing new." in done.stdout


def resubmit(kfp, run):
    """Submit a run again, as the exit handler of the run does."""
    content = {key: run[key] for key in ("display_name", "experiment_id", "runtime_config")}
    content["pipeline_version_reference"] = run["pipeline_version_reference"]
    return kfp.create("runs", content | {"description": describes(run["run_id"])})


@pytest.mark.parametrize(("state", "code"), [("SUCCEEDED", 0), ("FAILED", 1)])
def test_waiting_follows_resubmissions_to_the_last_outcome(kfp, monkeypatch, state, code):
    lost = [("train", "FAILED"), ("run", "FAILED")]
    kfp.script = [lost, lost, [("train", state), ("run", state)]]
    asked = kfp.run

    def answer(name):
        run = asked(name)
        if kfp.script:
            resubmit(kfp, run)
        return run

    monkeypatch.setattr(kfp, "run", answer)
    done = command("submit", "causal-lm", "--set", PLACE, "--host", kfp.address, "--wait")
    _, *later = kfp.all("runs")
    assert done.exit_code == code
    assert len(later) == 2
    for run in later:
        assert f"resubmitted as run {run['run_id']} ({kfp.address}/#/runs" in done.stdout


@pytest.mark.parametrize(("host", "refused"), [("127.0.0.1", True), ("elsewhere", False)])
def test_pod_that_no_node_can_hold_is_refused_before_anything_is_sent(
    kfp, monkeypatch, tmp_path, host, refused
):
    with kubernetes_server() as answers:
        answers.listing("/api/v1/nodes", node("", "24Gi"))
        monkeypatch.setenv("KUBECONFIG", str(answers.kubeconfig(tmp_path / "kubeconfig")))
        monkeypatch.setattr(submission, "_HERE", (host,))
        told, sets = [], [PLACE, "compute.pods.memory=200Gi"]
        with pytest.raises(BadInput, match="none of the 1 nodes") if refused else nullcontext():
            steadytrain.pipelines.submit("causal-lm", sets, host=kfp.address, notify=told.append)
    assert bool(kfp.all("runs")) != refused
    assert refused or "none of the 1 nodes" in told[-1]


@pytest.fixture
def cluster(monkeypatch):
    """The cluster that KUBECONFIG names."""
    with api_server.serving() as (server, connection):
        monkeypatch.setattr(following, "connect_to_cluster", lambda: connection)
        yield server


def pod(name, run_id, place, *, labels=(), **status):
    metadata = {"name": name, "labels": {PIPELINE_RUN: run_id, **dict(labels)}}
    metadata["annotations"] = {"workflows.argoproj.io/node-name": f"p-x7k2p.root.{place}"}
    return {"metadata": metadata, "status": {"phase": "Pending", **status}}


def pulling(reason, message):
    waiting = {"waiting": {"reason": reason, "message": message}}
    return [{"image": "none.test/step:1", "state": waiting}]


def test_waiting_shows_what_pods_wait_for_once_per_reason(kfp, cluster, submitted):
    unscheduled = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/3 nodes are available: 3 Insufficient cpu.",
    }
    place = "exit-handler-1.preprocess.executor"
    cluster.put("pods", pod("p-1", submitted.run_id, place, conditions=[unscheduled]))
    cluster.put("pods", pod("other", "another-run", place, conditions=[unscheduled]))
    running = [("preprocess", "RUNNING")]
    kfp.script = [running, running, [("preprocess", "SUCCEEDED"), ("run", "SUCCEEDED")]]
    seen = []
    submitted.wait(lambda steps: seen.append(steps["preprocess"]))
    assert [(step.state, step.waits_for) for step in seen] == [
        ("RUNNING", "Unschedulable: 0/3 nodes are available: 3 Insufficient cpu."),
        ("SUCCEEDED", ""),
    ]


def test_training_pods_count_for_their_step(kfp, cluster, submitted):
    name = "causal-lm-a1-node-0-0-abcde"
    status = {"containerStatuses": pulling("ErrImagePull", "no such host")}
    cluster.put("pods", pod(name, submitted.run_id, "", labels={RUN: "causal-lm"}, **status))
    kfp.script = [[("train", "RUNNING")], [("train", "FAILED"), ("run", "FAILED")]]
    seen = []
    submitted.wait(lambda steps: seen.append(steps["train"].waits_for))
    assert seen == ["ErrImagePull: no such host", ""]


def test_wrong_image_of_a_step_ends_the_wait_with_the_reason(kfp, cluster, monkeypatch):
    monkeypatch.setattr(following, "HOPELESS_SECONDS", 0.2)
    kfp.script = [[("preprocess", "RUNNING")]] * 1000
    asked = kfp.run

    def answer(name):
        status = {"containerStatuses": pulling("ErrImagePull", "none.test/step:1: not found")}
        cluster.put("pods", pod("p-1", name, "preprocess.executor", **status))
        return asked(name)

    monkeypatch.setattr(kfp, "run", answer)
    done = command("submit", "causal-lm", "--set", PLACE, "--host", kfp.address, "--wait")
    assert done.exit_code == 1
    assert "preprocess: waits: ErrImagePull" in done.stdout
    assert "preprocess cannot start: pod p-1, image none.test/step:1" in done.stderr
    assert "terminate the run" in done.stderr
    assert not [path for path in kfp.writes() if "terminate" in path]


def test_registry_that_does_not_answer_is_given_time(cluster, submitted):
    status = {"containerStatuses": pulling("ErrImagePull", "no such host")}
    cluster.put("pods", pod("p-1", submitted.run_id, "preprocess.executor", **status))
    pods = following.RunPods(submitted.run_id, "", submitted.version.steps)
    assert not pods.look().stuck
    pods._since["p-1"] -= following.HOPELESS_SECONDS + 1
    assert not pods.look().stuck
    pods._since["p-1"] -= following.REGISTRY_SECONDS
    assert "no such host" in pods.look().stuck


def test_invisible_pods_are_reported_once(kfp, cluster, submitted):
    cluster.denial = (403, {"message": "pods is forbidden", "reason": "Forbidden"})
    told = []
    kfp.script = [[("train", "RUNNING")], [("run", "SUCCEEDED")]]
    assert submitted.wait(notify=told.append).succeeded
    (line,) = told
    assert "pods is forbidden" in line


def test_terminal_gets_a_table(monkeypatch):
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=80)
    monkeypatch.setattr("rich.console.Console", lambda: console)
    with submit_commands._view() as show:
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
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("item", "remark"),
    [
        ("evaluation.max_examples=29", "fewer than gate.min_units = 30"),
        ("compute.launcher=process", "set pipeline.resources"),
    ],
)
def test_submit_names_what_cannot_act(item, remark):
    done = command("submit", "causal-lm", "--set", PLACE, "--set", item, "--dry-run")
    assert done.exit_code == 0
    assert remark in done.stderr


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

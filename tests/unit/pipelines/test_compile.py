"""The compiled pipeline: what a Kubeflow server receives."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys

import pytest
import yaml

from steadytrain.components.automl.component import report as report_search
from steadytrain.components.detect_change.component import detect_change
from steadytrain.components.preprocess.component import preprocess
from steadytrain.components.report.component import report
from steadytrain.components.shared.config.operations import PipelineConfig
from steadytrain.components.shared.config.parameters import PARAMETERS
from steadytrain.components.tune.component import report as report_study
from steadytrain.pipelines.compile import compile_pipeline
from steadytrain.pipelines.pod_names import (
    METRICS_LABEL,
    MOUNT_PATH,
    NAME,
    SCRAPE_ANNOTATIONS,
    SECRETS,
    STEP_SECRETS,
    SUPERVISING,
)

STEPS = {"preprocess", "train", "evaluate", "register", "promote", "report"}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return compile_pipeline(tmp_path_factory.mktemp("compile") / "pipeline.yaml")


@pytest.fixture(scope="module")
def documents(path):
    return list(yaml.safe_load_all(path.read_text()))


@pytest.fixture(scope="module")
def spec(documents):
    return documents[0]


@pytest.fixture(scope="module")
def attached(documents):
    """The Kubernetes settings of each executor, by name."""
    return documents[1]["platforms"]["kubernetes"]["deploymentSpec"]["executors"]


def tasks(spec):
    """Return every task of the DAG and of nested DAGs, by name."""
    dags = [spec["root"], *(part for part in spec["components"].values() if "dag" in part)]
    return {name: task for dag in dags for name, task in dag["dag"]["tasks"].items()}


@pytest.mark.slow
def test_compilation_is_deterministic(path, tmp_path):
    again = tmp_path / "again.yaml"
    code = (
        "import sys; from pathlib import Path; "
        "from steadytrain.pipelines.compile import compile_pipeline; "
        "compile_pipeline(Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", code, str(again)], check=True)
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.slow
def test_every_step_has_a_display_name(spec):
    found = tasks(spec)
    assert set(found) >= STEPS
    assert {found[step]["taskInfo"]["name"] for step in STEPS}.isdisjoint(STEPS)


def test_no_step_uses_kfps_cache(spec):
    assert all(
        not task.get("cachingOptions", {}).get("enableCache")
        for name, task in tasks(spec).items()
        if name in STEPS
    )


def test_only_the_promotion_is_conditional(spec):
    conditional = {
        name: part["dag"]["tasks"].keys()
        for name, part in spec["components"].items()
        if name.startswith("comp-condition")
    }
    assert [set(names) for names in conditional.values()] == [{"promote"}]


def test_report_runs_whatever_happened(spec):
    report = tasks(spec)["report"]
    assert report["triggerPolicy"]["strategy"] == "ALL_UPSTREAM_TASKS_COMPLETED"


def test_form_has_a_handful_of_parameters_each_described(spec):
    parameters = spec["root"]["inputDefinitions"]["parameters"]
    assert list(parameters) == sorted(item.name for item in PARAMETERS)
    assert all(parameter.get("description") for parameter in parameters.values())
    assert all(parameter.get("isOptional") for parameter in parameters.values())


def test_form_shows_each_parameter_as_it_is_declared(spec):
    shown = spec["root"]["inputDefinitions"]["parameters"]
    for item in PARAMETERS:
        assert shown[item.name]["description"] == item.description
        assert shown[item.name]["defaultValue"] == item.default


@pytest.mark.parametrize(
    "component", [preprocess, report, report_study, report_search, detect_change]
)
def test_steps_that_resolve_the_configuration_take_every_parameter(component):
    """KFP sends these functions as source, so they repeat the names and types."""
    taken = inspect.signature(component.python_func).parameters.values()
    inputs = {item.name: item.annotation for item in taken if isinstance(item.annotation, type)}
    declared = {item.name: type(item.default) for item in PARAMETERS if item.name != "volume"}
    assert inputs == {**declared, "job": str}
    body = ast.parse(inspect.getsource(component.python_func)).body[0].body
    assert ast.unparse(body[1]) == "arguments = locals()"
    assert ast.unparse(body[-1]).endswith("(**arguments)")


@pytest.mark.slow
def test_fused_pipeline_has_four_executors(tmp_path, spec):
    path = compile_pipeline(tmp_path / "fused.yaml", shape=PipelineConfig(fuse=True))
    fused = next(yaml.safe_load_all(path.read_text()))
    assert fused["deploymentSpec"]["executors"].keys() == {
        "exec-preprocess",
        "exec-train",
        "exec-evaluate-and-register",
        "exec-report",
    }
    assert fused["root"]["inputDefinitions"] == spec["root"]["inputDefinitions"]


@pytest.fixture(scope="module")
def tuning(tmp_path_factory):
    path = compile_pipeline(tmp_path_factory.mktemp("tune") / "pipeline.yaml", pipeline="tune")
    return list(yaml.safe_load_all(path.read_text()))


@pytest.mark.slow
def test_tuning_pipeline_trains_and_judges_the_winner_with_the_same_form(tuning, spec):
    found = tasks(tuning[0])
    assert (STEPS - {"train"}) | {"tune", "train-winner"} <= found.keys()
    assert tuning[0]["root"]["inputDefinitions"] == spec["root"]["inputDefinitions"]
    condition = found["condition-2"]["triggerPolicy"]["condition"]
    assert "tune-Output" in condition, "a study without seeds trains no winner"
    artifacts = found["evaluate"]["inputs"]["artifacts"]
    sources = {name: item["taskOutputArtifact"] for name, item in artifacts.items()}
    assert {item["producerTask"] for item in sources.values()} == {"train-winner"}
    assert sources["resolved"]["outputArtifactKey"] == "winner"


@pytest.fixture(scope="module")
def validating(tmp_path_factory):
    path = tmp_path_factory.mktemp("folds") / "pipeline.yaml"
    compile_pipeline(path, pipeline="cross-validate")
    return list(yaml.safe_load_all(path.read_text()))


@pytest.mark.slow
def test_cross_validation_is_one_step_and_a_report_with_the_same_form(validating, spec):
    executors = validating[0]["deploymentSpec"]["executors"]
    assert executors.keys() == {"exec-cross-validate", "exec-report"}
    assert validating[0]["root"]["inputDefinitions"] == spec["root"]["inputDefinitions"]
    made = validating[0]["components"]["comp-cross-validate"]["outputDefinitions"]["artifacts"]
    assert made.keys() == {"summary", "predictions", "page", "result"}


@pytest.fixture(scope="module")
def searching(tmp_path_factory):
    path = tmp_path_factory.mktemp("automl") / "pipeline.yaml"
    compile_pipeline(path, pipeline="automl")
    return list(yaml.safe_load_all(path.read_text()))


@pytest.mark.slow
def test_search_trains_and_judges_its_winner_with_the_same_form(searching, spec):
    found = tasks(searching[0])
    assert (STEPS - {"train"}) | {"search", "train-winner"} <= found.keys()
    assert searching[0]["root"]["inputDefinitions"] == spec["root"]["inputDefinitions"]
    given = found["train-winner"]["inputs"]["artifacts"]
    assert {item["taskOutputArtifact"]["producerTask"] for item in given.values()} == {"search"}
    judged = found["evaluate"]["inputs"]["artifacts"]
    assert {item["taskOutputArtifact"]["producerTask"] for item in judged.values()} == {
        "train-winner"
    }


def test_pods_that_supervise_a_study_are_treated_as_those_that_train(tuning, validating, searching):
    seen = set()
    for spec, platform in (tuning, validating, searching):
        executors = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
        for name in set(SUPERVISING) & {label.removeprefix("exec-") for label in executors}:
            annotations = executors[f"exec-{name}"]["podMetadata"]["annotations"]
            assert annotations["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
            passed_on = spec["components"][f"comp-{name}"]["taskConfigPassthroughs"]
            assert {"field": "KUBERNETES_NODE_SELECTOR"} in passed_on
            seen.add(name)
    assert seen == set(SUPERVISING) - {"train"}


def test_component_bodies_only_call_the_package(spec):
    for name, executor in spec["deploymentSpec"]["executors"].items():
        source = executor["container"]["command"][-1]
        body = source.split('"""')[-1].strip().splitlines()
        imported = [line for line in body if line.strip() and line != "arguments = locals()"]
        assert imported[0].strip().startswith("from steadytrain.components."), name
        assert len(imported) == 2, name


def test_every_step_has_the_volume_that_the_run_names(spec, attached):
    assert attached.keys() == spec["deploymentSpec"]["executors"].keys()
    named = {label: item["pvcMount"][0]["pvcNameParameter"] for label, item in attached.items()}
    inner = {"componentInputParameter": "pipelinechannel--volume"}
    assert named.pop("exec-report") == {"componentInputParameter": "volume"}
    assert all(name == inner for name in named.values())
    assert {item["pvcMount"][0]["mountPath"] for item in attached.values()} == {MOUNT_PATH}
    parameters = spec["root"]["inputDefinitions"]["parameters"]
    assert parameters["volume"]["defaultValue"] == NAME
    assert parameters["output"]["defaultValue"] == MOUNT_PATH


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pipeline", "fuse"),
    [
        ("finetune", False),
        ("retrain", True),
        ("tune", False),
        ("cross-validate", False),
        ("automl", False),
    ],
)
def test_each_step_gets_only_its_own_secret_keys(tmp_path, pipeline, fuse):
    """Keys are passed by reference, and each key may be missing."""
    path = compile_pipeline(
        tmp_path / "pipeline.yaml", pipeline=pipeline, shape=PipelineConfig(fuse=fuse)
    )
    _, platform = yaml.safe_load_all(path.read_text())
    executors = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    for label, item in executors.items():
        (secret,) = item["secretAsEnv"]
        assert secret["secretName"] == NAME
        assert secret["optional"]
        assert all(key["secretKey"] == key["envVar"] for key in secret["keyToEnv"])
        given = [key["envVar"] for key in secret["keyToEnv"]]
        assert sorted(given) == sorted(STEP_SECRETS[label.removeprefix("exec-")])


def test_credentials_stay_with_the_steps_that_use_them():
    """The train step also runs user code and models from other people."""
    having = {
        key: {step for step, keys in STEP_SECRETS.items() if key in keys}
        for key in ("HF_TOKEN", "KF_PIPELINES_ENDPOINT", "STEADYTRAIN_WEBHOOK_URL")
    }
    assert having == {
        "HF_TOKEN": {
            *("detect-change", "preprocess", "train", "tune", "train-winner", "cross-validate"),
        },
        "KF_PIPELINES_ENDPOINT": {"report"},
        "STEADYTRAIN_WEBHOOK_URL": {"report", "train", "train-winner"},
    }
    assert "MLFLOW_FLASK_SERVER_SECRET_KEY" not in SECRETS


def test_images_are_versioned_and_install_nothing_at_run_time(spec):
    for executor in spec["deploymentSpec"]["executors"].values():
        image, command = executor["container"]["image"], " ".join(executor["container"]["command"])
        assert image.partition(":")[2] not in ("", "latest")
        assert "pip install" not in command


def test_autoscaler_does_not_evict_the_supervising_pod(attached):
    annotations = attached["exec-train"]["podMetadata"]["annotations"]
    assert annotations["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"


def test_prometheus_finds_the_pod_that_serves_metrics(attached):
    name, value = METRICS_LABEL
    metadata = {label: item["podMetadata"] for label, item in attached.items()}
    serving = [label for label, item in metadata.items() if item["labels"].get(name) == value]
    assert serving == ["exec-train"]
    assert SCRAPE_ANNOTATIONS.items() <= metadata["exec-train"]["annotations"].items()

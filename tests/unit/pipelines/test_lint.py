"""The lint finds what would break on a server, and reports its place and a fix."""

import warnings
from dataclasses import replace

import pytest
import yaml

from steadytrain.components.shared.config import load
from steadytrain.components.shared.errors import BadInput, ConfigError
from steadytrain.pipelines import dags
from steadytrain.pipelines.compile import (
    UnsafePipeline,
    checked,
    compile_pipeline,
    lint,
    read_pipeline,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from kfp import compiler, dsl, kubernetes

HOUR = 3600
TOKEN = "hf_" + "a" * 34


@dsl.component(base_image="example.test/image:1.0", install_kfp_package=False)
def work(text: str = "") -> str:
    return text


@dsl.component(base_image="steadytrain/step:1.0", install_kfp_package=False)
def ours() -> None:
    from steadytrain.components.report import step  # noqa: F401


def image(name):
    @dsl.component(base_image=name, install_kfp_package=False)
    def step() -> None:
        pass

    return step


def limited(task):
    return task.set_cpu_limit("1").set_memory_limit("1Gi")


@pytest.fixture
def findings(tmp_path):
    """Compile a pipeline with the given body, and lint it."""

    def find(body, name="pipeline.yaml"):
        dsl_pipeline = dsl.pipeline(name="p")(body)
        compiler.Compiler().compile(dsl_pipeline, str(tmp_path / name))
        return lint(*read_pipeline(tmp_path / name))

    return find


def retried(timeout=None, **retry):
    def body():
        task = limited(work()).set_retry(**retry)
        if timeout:
            kubernetes.set_timeout(task, timeout)

    return body


def loop(nested=False):
    @dsl.pipeline
    def inner():
        limited(work()).set_retry(2, backoff_max_duration="2d")

    def body():
        with dsl.ParallelFor([1, 2]):
            if nested:
                inner()
            else:
                limited(work()).set_retry(2, backoff_max_duration="2d")

    return body


def of_image(name):
    return lambda: limited(image(name)()) and None


def cached(component, on):
    return lambda: limited(component()).set_caching_options(on) and None


def asks_for_a_token(hf_token: str):
    limited(work())


def brings_a_token(start: str = TOKEN):
    limited(work())


def gives_a_token():
    limited(work(text=TOKEN))


def sets_a_token():
    limited(work()).set_env_variable("WHERE", "https://me:hunter2@example.test")


def unlimited():
    work().set_memory_limit("1Gi")


@pytest.mark.parametrize(
    ("body", "place", "words", "unsafe"),
    [
        (retried(num_retries=2), "task work", "within 1 h, and has no timeout", True),
        (retried(num_retries=1, timeout=2 * HOUR), "task work", "is 1 h", True),
        (
            retried(num_retries=3, timeout=HOUR, backoff_max_duration="2h"),
            "task work",
            "window for 3 retries is 2 h",
            False,
        ),
        (
            retried(num_retries=1, backoff_factor=1.5, backoff_max_duration="2d"),
            "task work",
            "factor 1.5",
            True,
        ),
        (loop(), "task for-loop-2 > work", "ignores set_retry", True),
        (loop(nested=True), "task for-loop-2 > inner > work", "ignores set_retry", True),
        (of_image("example.test/a:latest"), "task step", "tagged latest", True),
        (of_image("example.test:5000/a"), "task step", "without a tag", True),
        (cached(ours, on=True), "task ours", "KFP's cache on", True),
        (unlimited, "task work", "no limit of CPU:", False),
        (asks_for_a_token, "parameter hf_token", "contains a secret", True),
        (brings_a_token, "parameter start", "contains a secret", True),
        (gives_a_token, "task work", "its input text contains a secret", True),
        (sets_a_token, "executor exec-work", "WHERE contains a secret", True),
    ],
)
def test_each_trap_is_reported_at_its_place(findings, body, place, words, unsafe):
    (found,) = findings(body)
    assert (found.location, found.unsafe) == (place, unsafe)
    assert words in found.message
    assert found.remedy
    assert TOKEN not in str(found)
    assert "hunter2" not in str(found)


@pytest.mark.parametrize(
    "body",
    [
        retried(num_retries=2, timeout=HOUR, backoff_max_duration="3h"),
        retried(num_retries=2, backoff_factor=2, backoff_max_duration="7d"),
        of_image("example.test:5000/a:1.0"),
        of_image("example.test/a@sha256:" + "0" * 64),
        cached(ours, on=False),
        cached(work, on=True),
    ],
)
def test_correct_pipelines_pass(findings, body):
    assert findings(body) == []


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ["finetune", "retrain", "tune", "cross-validate", "automl"])
def test_bundled_pipelines_pass(tmp_path, pipeline):
    told = []
    path = compile_pipeline(tmp_path / "pipeline.yaml", told.append, pipeline=pipeline)
    assert told == []
    assert checked(path) == []


def test_suggested_window_is_accepted(findings):
    (found,) = findings(retried(num_retries=2, timeout=3 * HOUR))
    window = found.remedy.partition("'")[2].partition("'")[0]
    again = retried(num_retries=2, timeout=3 * HOUR, backoff_max_duration=window)
    assert findings(again, "again.yaml") == []


def test_unsafe_pipeline_is_not_compiled(tmp_path, monkeypatch):
    leaky = replace(dags.DAGS["finetune"], build=lambda *_: gives_a_token())
    monkeypatch.setitem(dags.DAGS, "finetune", leaky)
    with pytest.raises(UnsafePipeline, match="its input text contains a secret") as raised:
        compile_pipeline(tmp_path / "pipeline.yaml")
    assert raised.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "a: 1", "- 1", "a: [", "pipelineInfo: {}"])
def test_file_that_is_not_a_pipeline_is_rejected(tmp_path, text):
    path = tmp_path / "file.yaml"
    path.write_text(text)
    with pytest.raises(BadInput, match=r"file\.yaml"):
        read_pipeline(path)
    with pytest.raises(BadInput, match="no such file"):
        read_pipeline(tmp_path / "none.yaml")


@pytest.mark.slow
def test_every_executor_has_limits(tmp_path):
    spec, _ = read_pipeline(compile_pipeline(tmp_path / "pipeline.yaml"))
    for name, executor in spec["deploymentSpec"]["executors"].items():
        resources = executor["container"]["resources"]
        assert resources["cpuRequest"] <= resources["cpuLimit"], name
        assert resources["memoryRequest"] < resources["memoryLimit"], name
    assert yaml.safe_dump(spec)


@pytest.mark.slow
def test_steps_reserve_what_the_configuration_says(tmp_path):
    given = load("causal-lm", ["pipeline.resources={train: {cpu: 24, memory: 3Gi}}"])
    path = compile_pipeline(tmp_path / "pipeline.yaml", shape=given.pipeline)
    spec, _ = read_pipeline(path)
    executors = spec["deploymentSpec"]["executors"]
    train = executors["exec-train"]["container"]["resources"]
    assert (train["resourceCpuRequest"], train["resourceMemoryRequest"]) == ("24", "3Gi")
    assert train["resourceCpuLimit"] == "24", "a request is never above its limit"
    usual, _ = read_pipeline(compile_pipeline(tmp_path / "usual.yaml"))
    for name, executor in usual["deploymentSpec"]["executors"].items():
        if name != "exec-train":
            assert executors[name]["container"]["resources"] == executor["container"]["resources"]


def test_resources_of_an_unknown_step_are_rejected():
    with pytest.raises(ConfigError, match=r"pipeline\.resources"):
        load("causal-lm", ["pipeline.resources={training: {cpu: 1}}"])

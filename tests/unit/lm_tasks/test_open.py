"""Tasks that can't run are rejected before any work starts, with their name and the fix."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import yaml

from steadytrain.components.shared import lm_tasks
from steadytrain.components.shared.config import GateConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.lm_tasks import check_lm_tasks, open_lm_tasks
from steadytrain.components.shared.stage import start_run

from support.evaluating import make_config
from support.lm_tasks import DOCUMENTS, write_tasks


def asking(*tasks, metric=None, **floors):
    """Return the part of a configuration that the check reads."""
    return SimpleNamespace(
        evaluation=SimpleNamespace(tasks=list(tasks)),
        gate=GateConfig(floors=floors, metric=metric),
    )


@pytest.fixture
def tasks(tmp_path):
    return write_tasks(tmp_path)


def write(folder, **content):
    path = folder / "other.yaml"
    path.write_text(
        yaml.safe_dump({"task": "other", "doc_to_text": "a", "doc_to_target": "b"} | content)
    )
    return str(path)


def test_local_tasks_are_opened_with_their_includes(tasks):
    opened = open_lm_tasks(asking(*tasks.values()))
    assert list(opened.loaded["tasks"]) == ["choosing", "reading", "answering"]
    assert len(opened.loaded["tasks"]["choosing"].eval_docs) == len(DOCUMENTS)
    assert opened.loaded["tasks"]["choosing"].get_config("num_fewshot") == 0


@pytest.mark.slow
def test_group_opens_its_tasks(tasks, tmp_path):
    path = tmp_path / "both.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "group": "both",
                "task": ["choosing", "answering"],
                "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
            }
        )
    )
    opened = open_lm_tasks(asking(str(path), **{"both/acc": 0.1}))
    assert list(opened.loaded["tasks"]) == ["choosing", "answering"]


def test_equal_tasks_have_equal_digests(tasks):
    name = tasks["choosing"]
    assert open_lm_tasks(asking(name)).digest == open_lm_tasks(asking(name)).digest
    assert open_lm_tasks(asking(name)).digest != open_lm_tasks(asking(tasks["reading"])).digest


_FUNCTIONS = """
from functools import partial

def helper(doc):
    return doc["question"]

def asked(doc):
    return helper(doc)

def shortened(docs, longest=9):
    return docs.map(lambda doc: {"question": doc["question"][:longest]})

def first(instances, docs):
    return [one[:1] for one in instances]

def shown():
    return [{"question": "a", "choices": ["b"], "answer": 0}]

short = partial(shortened, longest=3)
"""
_DIGEST = """
import sys, types
from steadytrain.components.shared.config import GateConfig
from steadytrain.components.shared.lm_tasks import open_lm_tasks
asked = types.SimpleNamespace(
    evaluation=types.SimpleNamespace(tasks=[sys.argv[1]]), gate=GateConfig(floors={}, metric=None)
)
print(open_lm_tasks(asked).digest)
"""


@pytest.fixture
def with_functions(tmp_path):
    """Return a task whose settings are functions, also within lists."""
    tasks = write_tasks(tmp_path)
    (tmp_path / "functions.py").write_text(_FUNCTIONS)
    path = tmp_path / "functional.yaml"
    path.write_text(
        f"include: {tasks['answering']}\n"
        "task: functional\n"
        "doc_to_text: !function functions.asked\n"
        "process_docs: !function functions.short\n"
        "fewshot_config: {sampler: first_n, samples: !function functions.shown}\n"
        "filter_list:\n"
        "  - name: one\n"
        "    filter:\n"
        "      - {function: custom, filter_fn: !function functions.first}\n"
    )
    return path


@pytest.mark.slow
def test_functions_have_the_same_digest_in_every_process(with_functions):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _DIGEST, str(with_functions)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        for seed in "12"
    ]
    found = {process.communicate()[0].strip().rpartition("\n")[2] for process in processes}

    assert len(found) == 1
    assert all(found)


def test_what_a_function_calls_counts_in_the_digest(with_functions):
    before = open_lm_tasks(asking(str(with_functions))).digest
    functions = with_functions.with_name("functions.py")
    functions.write_text(_FUNCTIONS.replace('doc["question"]\n\ndef asked', '"?"\n\ndef asked'))

    assert open_lm_tasks(asking(str(with_functions))).digest != before


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            {
                "dataset_path": "json",
                "dataset_kwargs": {"data_files": "https://example.com/x.json"},
            },
            "would be downloaded from https://example.com/x.json",
        ),
        (
            {"dataset_path": "csv", "dataset_kwargs": {"data_files": {"test": ["s3://b/x.csv"]}}},
            "would be downloaded from s3://b/x.csv",
        ),
        ({"dataset_path": "json"}, "would read everything in the current folder"),
        ({"dataset_path": "somebody/something"}, "cannot be opened: .*somebody/something"),
        ({"output_type": "guessing"}, "guessing"),
    ],
)
def test_tasks_without_local_data_are_rejected(tmp_path, monkeypatch, content, said):
    # Downloads must be blocked by the code under test, not by the environment of the tests.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    name = write(tmp_path, test_split="test", **content)
    with pytest.raises(BadInput, match=said) as caught:
        open_lm_tasks(asking(name))
    assert name in str(caught.value)
    assert caught.value.remedy


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing.yaml", "there is no such file"),
        ("folder/missing.yml", "there is no such file"),
        ("hellaswg", "did you mean hellaswag"),
    ],
)
def test_unknown_task_names_are_rejected(name, said):
    with pytest.raises(BadInput, match=f"evaluation.tasks = '{name}'") as caught:
        open_lm_tasks(asking(name))
    assert said in str(caught.value)


def test_tasks_that_run_model_code_are_rejected(tmp_path):
    name = write_tasks(tmp_path, answering={"unsafe_code": True})["answering"]
    with pytest.raises(BadInput, match="runs code that the model writes"):
        open_lm_tasks(asking(name))


@pytest.mark.parametrize(
    ("gate", "said"),
    [
        ({"choosing/accuracy": 0.5}, "one of choosing/acc, choosing/acc_norm"),
        ({"nothing/acc": 0.5}, "no task of evaluation.tasks has that metric"),
        ({"metric": "reading/word_perplexity"}, "is not a mean over documents"),
        ({"metric": "choosing/nothing"}, "gate.metric = 'choosing/nothing'"),
    ],
)
def test_metrics_that_the_gate_cannot_use_are_rejected(tasks, gate, said):
    with pytest.raises(BadInput) as caught:
        open_lm_tasks(asking(tasks["choosing"], tasks["reading"], **gate))
    assert said in str(caught.value)


def test_task_metrics_can_be_floors_and_the_gate_metric(tasks):
    floors = {"choosing/acc": 0.5, "reading/word_perplexity": 50.0}
    for metric in ("choosing/acc_norm", "reading/bits_per_byte"):
        open_lm_tasks(asking(*tasks.values(), metric=metric, **floors))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("choosing", {"num_fewshot": 50, "fewshot_split": "test"}, "Sample larger than population"),
        ("choosing", {"repeats": 0}, "choosing cannot be run by lm-eval: IndexError"),
        ("answering", {"description": 5}, "answering cannot be run by lm-eval: TypeError"),
        ("reading", {"doc_to_target": ""}, "reading cannot be run by lm-eval: ZeroDivisionError"),
    ],
)
def test_task_runtime_errors_are_found_before_training(tmp_path, name, content, said):
    path = write_tasks(tmp_path, **{name: content})[name]
    with pytest.raises(BadInput, match=said):
        check_lm_tasks(asking(path))


def test_metrics_without_a_known_aggregation_are_rejected(tmp_path):
    metrics = [{"metric": "acc", "aggregation": "nothing", "higher_is_better": True}]
    path = write_tasks(tmp_path, choosing={"metric_list": metrics})["choosing"]
    with pytest.raises(BadInput, match="'acc' whose aggregation lm-eval does not know"):
        open_lm_tasks(asking(path))


@pytest.mark.parametrize("setting", ["custom_generate", "trust_remote_code", "assistant_model"])
def test_answers_come_only_from_the_model(tmp_path, setting):
    content = {"generation_kwargs": {"until": ["."], setting: "somebody/something"}}
    path = write_tasks(tmp_path, answering=content)["answering"]
    with pytest.raises(BadInput, match=f"generation_kwargs.{setting}"):
        open_lm_tasks(asking(path))


def lacking(monkeypatch, *modules):
    find = lm_tasks.importlib.util.find_spec
    monkeypatch.setattr(
        lm_tasks.importlib.util, "find_spec", lambda name: None if name in modules else find(name)
    )


def test_training_needs_lm_eval_installed(tasks, monkeypatch):
    lacking(monkeypatch, "lm_eval")
    with pytest.raises(BadInput, match="lm-eval is not installed") as caught:
        check_lm_tasks(asking(tasks["choosing"]))
    assert "steadytrain[lm-eval]" in caught.value.remedy
    check_lm_tasks(asking())


def test_lm_eval_is_optional_for_preprocessing_only(monkeypatch):
    lacking(monkeypatch, "lm_eval", "torch")
    check_lm_tasks(asking("missing.yaml"))


def test_run_with_an_unusable_task_does_not_start(tmp_path):
    config = make_config(tmp_path, "run", evaluation={"tasks": ["missing.yaml"]})
    with pytest.raises(BadInput, match=r"missing.yaml.*no such file"):
        start_run(config)

"""Several data sets in one run: what is rejected, and what identifies a run."""

from __future__ import annotations

import jsonschema
import pytest

from steadytrain.components.shared.config import RunConfig, from_mapping
from steadytrain.components.shared.errors import ConfigError
from steadytrain.components.tasks.checks import check_task

from support.weight_digests import BERT

PARTS = {"mood": {"source": ["mood.jsonl"]}, "topic": {"source": ["topic.jsonl"]}}

GATE = {"max_slice_regression": 0.02}


def configure(data=None, **training):
    data = {"task": "multi_task", "parts": PARTS} | (data or {})
    content = {"name": "tiny", "model": {"config": BERT}, "training": training, "gate": GATE}
    return from_mapping(content | {"data": data})


def test_source_is_that_of_all_parts_and_reads_back():
    config = configure()
    assert config.data.source == ["mood.jsonl", "topic.jsonl"]
    assert from_mapping(config.model_dump(mode="json")) == config


def test_settings_of_a_part_are_those_of_a_run_with_it_alone():
    columns = {"text": "body", "label": "class"}
    parts = PARTS | {"mood": {**PARTS["mood"], "columns": columns, "labels": ["x", "y"]}}
    mood = configure({"parts": parts, "split_salt": "s"}).data.by_part()["mood"]
    assert (mood.part, mood.source, mood.columns.text) == ("mood", ["mood.jsonl"], "body")
    assert (mood.labels, mood.split_salt) == (["x", "y"], "s")


def test_problem_elsewhere_invents_none_of_the_source():
    with pytest.raises(ConfigError) as caught:
        configure(learning_rate=-1)
    assert [problem.field for problem in caught.value.problems] == ["training.learning_rate"]


@pytest.mark.parametrize(
    ("data", "training", "message"),
    [
        ({"parts": {}, "source": ["a"]}, {}, "data.parts = .*give the parts together"),
        ({"task": "sequence_classification"}, {}, "data.parts .*data.task is sequence_class"),
        ({"parts": {"mood": PARTS["mood"]}}, {}, "give at least two"),
        ({"parts": PARTS | {"a/b": {"source": ["a"]}}}, {}, r"data\.parts\.a/b"),
        ({"source": ["other.jsonl"]}, {}, r"data\.source .*data\.parts\.NAME\.source"),
        ({"test_source": ["t"]}, {}, r"data\.test_source .*data\.parts is set"),
        ({"labels": ["x", "y"]}, {}, r"data\.labels .*data\.parts\.NAME\.labels"),
        ({"columns": {"text": "body"}}, {}, r"data\.columns .*each part has its own"),
        (
            {"parts": PARTS | {"mood": {"source": ["m"], "columns": {"slice": "s"}}}},
            {},
            "the parts are the slices",
        ),
        ({}, {"multi_task": {"sampling": "weights"}}, "give the weight of each part"),
        ({}, {"multi_task": {"temperature": 3}}, "set sampling to temperature"),
        ({}, {"multi_task": {"loss_weights": {"mood": 2}}}, "one weight for each of them"),
        (
            {},
            {
                "multi_task": {
                    "loss_weights": {"mood": 2, "topic": 1},
                    "loss_weighting": "uncertainty",
                }
            },
            r"loss_weights .*loss_weighting is uncertainty.*leave one of the two out",
        ),
        (
            {},
            {"multi_task": {"sampling": "temperature"}, "curriculum": {"by": "length"}},
            "it is an order of its own",
        ),
        (
            {},
            {"multi_task": {"sampling": "temperature"}, "order": "balanced"},
            "it is an order of its own",
        ),
    ],
)
def test_what_does_not_fit_together_is_an_error(data, training, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        configure(data, **training)


@pytest.mark.slow
def test_schema_requires_a_source_or_parts():
    content = configure().model_dump(mode="json", exclude_unset=True)
    content["data"] = {"task": "multi_task", "parts": PARTS}
    schema = RunConfig.model_json_schema()
    jsonschema.validate(content, schema)
    jsonschema.validate({**content, "data": {"source": ["a.jsonl"]}}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**content, "data": {"task": "multi_task"}}, schema)


def test_gate_needs_a_limit_for_each_part():
    content = configure().model_dump(mode="json") | {"gate": {}}
    with pytest.raises(ConfigError, match=r"(?s)gate\.max_slice_regression .*for example 0\.02"):
        from_mapping(content)


def test_folds_are_an_error():
    content = configure().model_dump(mode="json") | {"cross_validation": {"fold": 0}}
    with pytest.raises(ConfigError, match=r"cross_validation\.fold .*several folds"):
        from_mapping(content)


@pytest.mark.parametrize("name", ["distillation", "batch_contrastive", "mixup"])
def test_objectives_of_other_classifiers_are_errors(name):
    on = {
        "distillation": {"teacher": "folder:x"},
        "batch_contrastive": {"rows": 4},
        "mixup": {"alpha": 0.4},
    }
    with pytest.raises(ConfigError, match=rf"training\.{name} .*multi_task does not include it"):
        check_task(configure(**{name: on[name]}))


def test_another_task_does_not_read_the_weights():
    content = {
        "name": "tiny",
        "data": {"source": ["a"]},
        "model": {"config": BERT},
        "training": {"multi_task": {"sampling": "temperature"}},
    }
    with pytest.raises(ConfigError, match="causal_lm does not include it"):
        check_task(from_mapping(content))


def test_each_setting_identifies_the_run():
    runs = [
        configure(),
        configure(multi_task={"sampling": "temperature"}),
        configure(multi_task={"loss_weighting": "uncertainty"}),
        configure(multi_task={"loss_weights": {"mood": 2, "topic": 1}}),
        configure({"parts": PARTS | {"mood": {"source": ["other.jsonl"]}}}),
    ]
    assert len({run.run_id for run in runs}) == len(runs)

"""Configurations are read, overridden, and rejected with every problem at once."""

from __future__ import annotations

import pytest
import yaml

from steadytrain.components.shared.config import (
    RunConfig,
    document,
    from_mapping,
    from_parameters,
    load,
    preset_names,
    to_parameters,
)
from steadytrain.components.shared.config.load import override_items
from steadytrain.components.shared.config.secrets import find_secrets, redact
from steadytrain.components.shared.errors import BadInput, ConfigError
from steadytrain.components.shared.workspace import Workspace

from support.minimal import MINIMAL, problems


@pytest.mark.parametrize("name", preset_names())
def test_presets_read_back_equal(name):
    config = load(name)
    assert load(config.to_yaml()) == config


def test_huge_file_is_rejected_before_it_is_parsed(tmp_path, monkeypatch):
    monkeypatch.setattr(document, "_content", None)
    place = tmp_path / "config.yaml"
    with place.open("wb") as handle:
        handle.write(b"name: x\n")
        handle.truncate(60_000_000)
    with pytest.raises(BadInput, match=r"not the name of a preset: larger than 1\.05 MB"):
        load(place)


def test_every_problem_is_reported_at_once_with_field_value_and_remedy():
    found = problems(
        {
            **MINIMAL,
            "name": "Bad Name",
            "training": {"learning_rat": 3, "warmup_steps": -1, "max_steps": 0},
            "compute": {"nproc_per_node": "two"},
        }
    )
    assert set(found) >= {
        "name",
        "training.learning_rat",
        "training.warmup_steps",
        "training.max_steps",
        "compute.nproc_per_node",
    }
    assert found["training.learning_rat"].remedy == "did you mean learning_rate?"
    assert found["training.warmup_steps"].value == "-1"
    assert all(problem.remedy for problem in found.values())


@pytest.mark.parametrize(
    "field", ["learning_rate", "max_steps", "save_total_limit", "param_groups.0.unfreeze_at"]
)
def test_truth_values_are_no_numbers(field):
    value = {field: True}
    if field.startswith("param_groups"):
        value = {"param_groups": [{"match": ".", "unfreeze_at": True}]}
    (problem,) = problems({**MINIMAL, "training": value}).values()
    assert "not a number" in problem.message
    assert problem.field == f"training.{field}"


@pytest.mark.parametrize(
    "section",
    [
        {"training": {"mixture": {"weights": {"web": 1, "code": False}}}},
        {"training": {"class_weights": {"given": {"rare": True}}}},
        {"gate": {"floors": {"accuracy": True}}},
    ],
)
def test_truth_values_in_maps_are_no_numbers(section):
    assert any(
        "has true or false, and not a number" in problem.message
        for problem in problems({**MINIMAL, **section}).values()
    )


def test_weights_whose_sum_is_infinite_are_refused():
    weights = {"web": 1e308, "code": 1e308}
    mixture = {"by": "weight", "weights": weights}
    found = problems({**MINIMAL, "training": {"mixture": mixture}})
    assert "less than or equal to 1000000000" in found["training.mixture.weights.web"].message


def test_cross_field_problems_name_both_fields():
    found = problems(
        {**MINIMAL, "training": {"global_batch_size": 6}, "compute": {"nproc_per_node": 4}}
    )
    (problem,) = found.values()
    assert (problem.field, problem.value) == ("training.global_batch_size", "6")
    assert "compute.nproc_per_node 4" in problem.message
    assert problem.remedy == "for example 4"


def test_cross_field_checks_run_despite_an_invalid_field():
    found = problems(
        {
            "name": "Bad Name",
            "data": {"source": ["a.txt"], "validation_share": 0.5, "test_share": 0.45},
            "model": {"base": "folder", "config": {"model_type": "llama"}},
            "training": {"global_batch_size": 6, "learning_rate": -1, "bf16": True, "fp16": True},
            "compute": {"nproc_per_node": 4},
        }
    )
    assert set(found) == {
        "name",
        "data.test_share",
        "model.config",
        "training.learning_rate",
        "training.fp16",
        "training.global_batch_size",
    }


@pytest.mark.parametrize(
    "address", ["a.jsonl", "A.NDJSON.gz", "package:x/a.csv.zst", "s3://b/*.parquet", "b.json"]
)
@pytest.mark.parametrize("field", ["data.source", "data.test_source"])
def test_a_preset_of_source_code_does_not_take_a_file_of_records_for_one_text(address, field):
    with pytest.raises(ConfigError) as error:
        load("causal-lm", {field: [address]})
    (problem,) = error.value.problems
    assert problem.field == "data.format"
    assert f"{field} has {address}, whose records would become one text" in problem.message
    right = problem.remedy.split("data.format to ")[1].split(",")[0]
    fixed = {"data.format": right, "data.columns.slice": None}
    assert right in ("jsonl", "csv", "parquet", "json")
    assert load("causal-lm", {field: [address], **fixed}).data.format == right
    suffix = problem.remedy.split("add ")[1].split()[0]
    assert load("causal-lm", {field: [address], "data.suffixes": [".py", suffix]}).data.suffixes


def test_a_part_of_source_code_does_not_take_a_file_of_records_for_one_text():
    with pytest.raises(ConfigError) as error:
        load("multi-task", {"data.parts.sklearn.source": ["a.parquet"]})
    (problem,) = error.value.problems
    assert problem.field == "data.parts.sklearn.format"
    load("multi-task", {"data.parts.sklearn.source": ["a.txt", "src"]})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"training": {"bf16": True, "fp16": True}},
            "in one of the two, and training.bf16 is true",
        ),
        ({"training": {"global_batch_size": 6, "micro_batch_size": 4}}, "does not divide"),
        ({"model": {}}, "no model to start from"),
        (
            {"model": {"base": "x", "config": {"model_type": "llama"}}},
            "cannot be combined with model.base",
        ),
        ({"data": {"source": []}}, "at least 1 item"),
        ({"data": {"source": ["a"], "validation_share": 0.5, "test_share": 0.5}}, "a tenth"),
        ({"data": {"source": ["a", "b", "a"]}}, "data.source lists it already"),
        ({"data": {"source": ["a"], "test_source": ["a"]}}, "data.source lists it already"),
    ],
)
def test_unworkable_settings_are_rejected(change, words):
    assert any(words in problem.message for problem in problems({**MINIMAL, **change}).values())


def test_a_single_address_is_a_list_of_one():
    data = {"source": "a.jsonl", "validation_source": "b.jsonl", "test_source": "c.jsonl"}
    config = from_mapping({**MINIMAL, "data": data})
    assert config.data.source == ["a.jsonl"]
    assert (config.data.validation_source, config.data.test_source) == (["b.jsonl"], ["c.jsonl"])
    assert config == from_mapping(
        {**MINIMAL, "data": {name: [address] for name, address in data.items()}}
    )
    parts = {"one": {"source": "a"}, "two": {"source": "b"}}
    shared = {"data": {"task": "multi_task", "parts": parts}, "gate": {"max_slice_regression": 0.1}}
    assert from_mapping({**MINIMAL, **shared}).data.source == ["a", "b"]


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (["a", "a", "b"], "the label 'a' is listed 2 times"),
        (["a", " ", "b"], "a label is empty"),
        (["a"], "name at least two labels"),
        ([], "name at least two labels"),
    ],
)
def test_labels_are_a_choice(labels, words):
    content = {"name": "tiny", "model": {"base": "x"}}
    data = {"source": ["x"], "task": "sequence_classification", "labels": labels}
    with pytest.raises(ConfigError, match=rf"data\.labels.*{words}"):
        from_mapping({**content, "data": data})
    # A target may also be one column; the error is about the list.
    targets = {"source": ["x"], "task": "tabular_multi_label", "target": labels}
    with pytest.raises(ConfigError, match=rf"data\.target.*{words}"):
        from_mapping({**content, "data": targets})
    part = {"source": ["x"], "labels": labels}
    parts = {"task": "multi_task", "parts": {"one": part, "two": part}}
    with pytest.raises(ConfigError, match=rf"parts\.one\.labels.*{words}"):
        from_mapping({**content, "data": parts})


def test_rejected_kind_leaves_no_second_problem():
    compression = {"kind": "powersgd", "start": 3}
    with pytest.raises(ConfigError) as caught:
        load("causal-lm", [("training.gradient_compression", compression)])
    assert [item.field for item in caught.value.problems] == ["training.gradient_compression.kind"]


@pytest.mark.parametrize(
    ("version", "words"), [(0, "rewrite it"), (2, "newer steadytrain"), ("x", "rewrite it")]
)
def test_another_schema_version_is_rejected_by_name(version, words):
    found = problems({**MINIMAL, "schema_version": version})
    assert words in found["schema_version"].remedy


SECRETS = [
    "hf_" + "a" * 34,
    "AKIA" + "A" * 16,
    "ghp_" + "b" * 36,
    "https://user:hunter2@tracking.example",
    "-----BEGIN RSA PRIVATE KEY-----",
]


@pytest.mark.parametrize("secret", SECRETS)
def test_secret_is_rejected_and_never_repeated(secret):
    content = {**MINIMAL, "tracking": {"uri": secret}}
    with pytest.raises(ConfigError) as caught:
        from_mapping(content)
    assert secret not in str(caught.value)
    assert "tracking.uri" in str(caught.value)
    assert secret not in redact(f"before {secret} after")


def test_secret_in_a_broken_configuration_is_not_repeated_either():
    secret = SECRETS[0]
    with pytest.raises(ConfigError) as caught:
        from_mapping({**MINIMAL, "training": {"tokn": secret, "seed": secret}})
    assert secret not in str(caught.value)


def test_ordinary_words_are_not_secrets():
    content = {
        "tokenizer": "hub:gpt2",
        "pad_token_id": 0,
        "eos_token": "",
        "uri": "postgresql://host/db",
    }
    assert list(find_secrets(content)) == []
    assert redact("s3://bucket/path at 10:20@noon") == "s3://bucket/path at 10:20@noon"


def test_overrides_by_dotted_name():
    config = load(
        yaml.safe_dump(MINIMAL), ["training.learning_rate=3e-4", "data.source=[b.txt, c.txt]"]
    )
    assert config.training.learning_rate == 3e-4
    assert config.data.source == ["b.txt", "c.txt"]


@pytest.mark.parametrize(
    ("stated", "taken"),
    [
        ("a\nb", "a\nb"),
        ("/data/run #2", "/data/run #2"),
        (" 2024 ", "2024"),
        ("'a  b'", "a  b"),
        ('"a\\nb"', "a\nb"),
    ],
)
def test_text_override_is_taken_verbatim(stated, taken):
    assert load(yaml.safe_dump(MINIMAL), [f"output={stated}"]).output == taken


@pytest.mark.parametrize("override", ["training.max_steps", "=3", "name.inner=3"])
def test_wrong_override_is_rejected(override):
    with pytest.raises(BadInput, match="override"):
        load(yaml.safe_dump(MINIMAL), [override])


@pytest.mark.parametrize("source", ["no-such-preset", "a: [1\nb: 2\n", "- a\n- b\n"])
def test_invalid_configuration_is_rejected(source):
    with pytest.raises(BadInput) as caught:
        load(source)
    assert caught.value.remedy


def test_run_name_depends_on_what_the_run_does():
    one = from_mapping(MINIMAL)
    same = from_mapping({**MINIMAL, "output": "elsewhere"})
    other = from_mapping({**MINIMAL, "training": {"seed": 1}})
    assert one.run_id == same.run_id != other.run_id
    assert from_mapping({**MINIMAL, "run": "mine"}).run_id == "mine"


def test_empty_parameters_change_nothing():
    config = from_parameters(
        config="causal-lm",
        overrides={},
        run="",
        output="",
        data_source="",
        base_model="",
        global_batch_size=0,
        learning_rate=0.0,
        num_train_epochs=0.0,
    )
    assert config == load("causal-lm")


def test_parameters_reach_their_fields():
    config = from_parameters(
        config="causal-lm",
        overrides={"training.max_steps": 7},
        data_source="a.txt,b.txt",
        base_model="some/folder",
        learning_rate=0.5,
    )
    assert config.data.source == ["a.txt", "b.txt"]
    assert (config.model.base, config.model.config) == ("some/folder", {})
    assert (config.training.learning_rate, config.training.max_steps) == (0.5, 7)


def test_unset_learning_rate_stays_unset_through_a_pipeline():
    sent = to_parameters(load(yaml.safe_dump(MINIMAL)), run="r")["config"]
    config = from_parameters(config=sent, overrides={}, learning_rate=0.0)
    assert config.training.learning_rate is None
    opened = from_parameters(config="chat", overrides={"training.learning_rate": None})
    assert opened.training.learning_rate is None


@pytest.mark.parametrize("text", ["{{$.pipeline_job_name}}", "a {{workflow.name}} b", "{{$}} é"])
def test_text_that_kfp_and_argo_would_replace_arrives_unchanged(text):
    given = load(yaml.safe_dump({**MINIMAL, "data": {**MINIMAL["data"], "exclude": [text]}}))
    sent = to_parameters(given, run="r")["config"]
    assert "{{" not in sent
    arrived = from_parameters(config=sent, overrides={})
    assert arrived == given.model_copy(update={"run": "r"})
    with pytest.raises(BadInput, match=r"output = .* contains \{\{"):
        to_parameters(given.model_copy(update={"output": f"/tmp/{text}"}), run="r")


@pytest.mark.parametrize("text", ["0\x850", "a\u2028 b", "\u2029", "é"])
def test_line_endings_in_text_round_trip(text):
    config = load(yaml.safe_dump({**MINIMAL, "data": {"source": ["a.txt", text]}}))
    assert config.data.source[1] == text
    assert load(config.to_yaml()) == config


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("model.base", text) for text in ("hub:", "hub:?revision=x", "s3://", "models:/")),
        *(("model.tokenizer", text) for text in ("package:", "package:/")),
        *(("output", text) for text in ("hub:x", "s3://", "s3://b/x", "models:/x", " ")),
    ],
)
def test_address_that_names_nothing_or_no_folder_is_rejected(field, value):
    with pytest.raises(ConfigError, match=f"{field} = .*(names nothing|is an address)"):
        load(yaml.safe_dump(MINIMAL), {field: value})


@pytest.mark.parametrize("address", ["hub:", "hub:?split=train", "s3://", "package:"])
def test_data_without_a_name_are_rejected(address):
    (problem,) = problems({**MINIMAL, "data": {"source": ["a.txt", address]}}).values()
    assert problem.field == "data.source.1"
    assert "names nothing" in problem.message


def test_text_that_yaml_takes_for_a_mapping_stays_text():
    text = yaml.safe_dump(MINIMAL)
    with pytest.raises(ConfigError, match=r"model.base = 'hub:': names nothing: give hub:NAME"):
        load(text, ["model.base=hub:"])
    assert load(text, ["tracking.experiment={a}"]).tracking.experiment == "{a}"


@pytest.mark.parametrize(
    ("override", "taken"),
    [
        ("data.source=a: b #1.csv", "a: b #1.csv"),
        ("data.target=12", "12"),
        ("data.target=[a, b]", ["a", "b"]),
        ("data.target=null", None),
        ("data.columns.image=x:", "x:"),
        ("model.fusion.image_base=hub:", "hub:"),
        ("model.fusion.image_base='hub:'", "hub:"),
        ("evaluation.batch_size=12", 12),
    ],
)
def test_text_is_taken_verbatim_where_a_field_may_also_be_a_list_or_empty(override, taken):
    ((_, value),) = override_items([override])
    assert value == taken


@pytest.mark.parametrize("override", ["=" + "x" * 50_000, "name." + "x" * 50_000 + ".y=1"])
def test_long_override_is_shortened_in_the_error(override):
    with pytest.raises(BadInput) as caught:
        load(yaml.safe_dump(MINIMAL), [override])
    assert len(str(caught.value)) < 1000


def test_field_given_twice_is_rejected():
    with pytest.raises(BadInput, match=r"training\.learning_rate"):
        from_parameters(
            config="causal-lm", overrides={"training.learning_rate": 1}, learning_rate=2.0
        )


def test_schema_describes_every_section():
    schema = RunConfig.model_json_schema()
    assert set(schema["properties"]) == set(RunConfig.model_fields)
    assert schema["additionalProperties"] is False


def test_price_does_not_change_the_run():
    priced = from_mapping({**MINIMAL, "compute": {"price_per_hour": 2.5}})
    assert priced.run_id == from_mapping(MINIMAL).run_id
    assert "compute.price_per_hour" in problems({**MINIMAL, "compute": {"price_per_hour": -1}})


def test_pod_quantities_use_kubernetes_notation():
    found = from_mapping({**MINIMAL, "compute": {"pods": {"cpu": 2, "memory": "7Gi"}}})
    assert (found.compute.pods.cpu, found.compute.pods.memory) == ("2", "7Gi")
    assert from_mapping({**MINIMAL, "compute": {"pods": {"cpu": "500m"}}}).compute.pods.cores == 0.5
    told = problems({**MINIMAL, "compute": {"pods": {"cpu": "many", "memory": "7 GB"}}})
    assert {"compute.pods.cpu", "compute.pods.memory"} <= set(told)


def test_pod_placement_does_not_change_the_run():
    moved = from_mapping({**MINIMAL, "compute": {"pods": {"memory": "99Gi"}}})
    assert moved.run_id == from_mapping(MINIMAL).run_id


def test_relative_output_needs_a_current_folder(tmp_path, monkeypatch):
    config = from_mapping({**MINIMAL, "output": "here"})
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(BadInput, match="output = 'here' cannot be used: No such file"):
        Workspace.of(config)


def test_an_override_without_a_value_is_an_error() -> None:
    """An unset variable of a script must not discard what the configuration states."""
    for text in ("", "  "):
        with pytest.raises(BadInput, match=r"'training.learning_rate=' has no value"):
            load("causal-lm", [f"training.learning_rate={text}"])
    assert load("causal-lm", ["recovery.checkpoints=null"]).recovery.checkpoints is None


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["training.max_steps=5", "training.max_steps=7"], "training.max_steps is set more than"),
        (["run=a", ("run", "b")], "run is set more than once; the last value counts"),
        (
            ["training.max_steps=5", "training={learning_rate: 0.1, max_steps: 5}"],
            "training is replaced as a whole, and no longer has training.adam_beta2, ",
        ),
        (["data.columns={}", "training.max_steps=5"], None),
        ([("data.source", ["a"]), "data.source=[b]", "model.config.num_hidden_layers=2"], None),
    ],
)
def test_what_an_override_takes_back_is_named(caplog, overrides, said):
    load("causal-lm", overrides)
    assert (said in caplog.text) if said else not caplog.text


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("task_options", {"x": 1}, "has no options"),
        ("target", "y", "does not learn from the columns of a table"),
        ("features", ["x"], "does not learn from the columns of a table"),
        ("categories", ["x"], "does not learn from the columns of a table"),
        ("allow_leaks", ["x"], "does not learn from the columns of a table"),
        ("images", {"size": 8}, "reads no images"),
        ("series", {"horizon": 2}, "forecasts no series"),
        ("train_on", "all", "has its own targets"),
        ("label_separator", ";", "has no lists of labels"),
    ],
)
def test_a_field_that_the_task_does_not_read_is_rejected_by_name(field, value, why):
    found = problems({**MINIMAL, "data": {**MINIMAL["data"], field: value}})
    assert set(found) == {f"data.{field}"}
    problem = found[f"data.{field}"]
    assert (problem.value, problem.message) == (repr(value), f"causal_lm {why}")
    assert problem.remedy.startswith("leave it out")

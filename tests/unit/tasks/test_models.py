"""Which models can be trained, and which are refused before any expensive work."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

from steadytrain.components.shared.config import load
from steadytrain.components.shared.config.load import preset_names
from steadytrain.components.shared.errors import BadInput, ConfigError
from steadytrain.components.tasks.base import OpenTask
from steadytrain.components.tasks.checks import check_task
from steadytrain.components.tasks.model_fields import splits_of, unknown_fields

from support.training import (
    CLASSES,
    GPT2,
    LLAMA,
    VOCABULARY,
    Bench,
    class_rows,
    language_rows,
    write_data,
    write_tokenizer,
)

ROBERTA = {
    "model_type": "roberta",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 34,
    "pad_token_id": 1,
    "vocab_size": VOCABULARY,
}


@pytest.fixture
def language(tmp_path):
    def make(*, sequence_length=48, **model):
        data = write_data(tmp_path / "data", language_rows(4), [], sequence_length=sequence_length)
        return OpenTask(Bench.make(tmp_path, data, model=model).config, data)

    return make


@pytest.fixture
def classes(tmp_path):
    def make(*, sequence_length=32, **model):
        data = write_data(
            tmp_path / "data",
            class_rows(4),
            [],
            task="sequence_classification",
            schema=CLASSES,
            labels=["a", "b", "c"],
            sequence_length=sequence_length,
        )
        return OpenTask(Bench.make(tmp_path, data, model=model).config, data)

    return make


def save_base(folder, config=LLAMA, auto=AutoModelForCausalLM, tokenizer=True, **changes):
    built = AutoConfig.for_model(**{"vocab_size": VOCABULARY, **config, **changes})
    model = auto.from_config(built)
    model.save_pretrained(folder)
    if tokenizer:
        write_tokenizer(folder)
    return model


def test_from_scratch_vocabulary_and_special_tokens_are_filled_in(language):
    model = language(config=GPT2).training.build_model()

    assert model.config.vocab_size == VOCABULARY
    assert (model.config.eos_token_id, model.config.pad_token_id) == (0, 1)
    assert model.config.bos_token_id is None


def test_seed_determines_weights_from_scratch(language):
    task = language(config=LLAMA)
    built = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        built.append(task.training.build_model().lm_head.weight)

    assert torch.equal(built[0], built[1])
    assert not torch.equal(built[0], built[2])


def test_base_is_loaded_in_float32(language, tmp_path):
    saved = save_base(tmp_path / "base").to(torch.bfloat16)
    saved.save_pretrained(tmp_path / "base")

    model = language(base=str(tmp_path / "base")).training.build_model()

    assert {item.dtype for item in model.parameters()} == {torch.float32}
    assert torch.equal(model.lm_head.weight, saved.lm_head.weight.float())


def test_model_records_the_splits_of_its_ancestors(language, tmp_path):
    save_base(tmp_path / "base", steadytrain_splits=["other"])
    task = language(base=str(tmp_path / "base"))
    ours = sorted(["other", task.data.split_digest])

    model = task.training.build_model()
    task.packager.export(model, tmp_path / "exported")

    assert splits_of(model) == ours
    assert splits_of(task.packager.load_exported(tmp_path / "exported")["model"]) == ours
    assert splits_of(language(config=LLAMA).training.build_model()) == [task.data.split_digest]


def test_unreadable_splits_are_rejected(language, tmp_path):
    save_base(tmp_path / "base", steadytrain_splits={"a": 1})
    with pytest.raises(BadInput, match="steadytrain_splits"):
        language(base=str(tmp_path / "base")).training.build_model()


def test_base_with_another_head_gets_a_new_one(classes, tmp_path):
    save_base(tmp_path / "base", ROBERTA, AutoModelForMaskedLM)

    model = classes(base=str(tmp_path / "base")).training.build_model()

    assert model.config.id2label == {0: "a", 1: "b", 2: "c"}
    assert model.config.num_labels == 3


def no_weights(folder):
    save_base(folder)
    (folder / "model.safetensors").unlink()


def torn_weights(folder):
    save_base(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def other_tokenizer(folder):
    save_base(folder, tokenizer=False, vocab_size=VOCABULARY + 2)
    write_tokenizer(folder, VOCABULARY + 2)


def small_vocabulary(folder):
    save_base(folder, tokenizer=False, vocab_size=VOCABULARY - 1)


def half_the_layers(folder):
    save_base(folder, num_hidden_layers=1)
    other = folder.with_name("other")
    save_base(other)
    shutil.copyfile(other / "config.json", folder / "config.json")


def edit_weights(folder, edit):
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder, **fields):
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | fields))


def no_head(folder):
    save_base(folder)
    edit_weights(folder, lambda weights: weights.pop("lm_head.weight"))


def layers_left_over(folder):
    save_base(folder)
    edit_config(folder, num_hidden_layers=1)


def fewer_layers_than_none(folder):
    save_base(folder)
    edit_config(folder, num_hidden_layers=-3)


def biases_left_over(folder):
    save_base(folder, attention_bias=True)
    edit_config(folder, attention_bias=False)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (no_head, "lacks 1 weight of the model, such as lm_head.weight"),
        (layers_left_over, "contains 9 weights that its config.json does not define"),
        (fewer_layers_than_none, "contains 18 weights that its config.json does not define"),
        (biases_left_over, "does not define, such as model.layers.0.self_attn.k_proj.bias"),
        (no_weights, "contains no weights"),
        (torn_weights, "cannot be loaded"),
        (other_tokenizer, "have another id in the data's tokenizer"),
        (small_vocabulary, "tokenizer has 64 tokens, the model's vocabulary 63"),
        (half_the_layers, "lacks 9 weights of the model, such as model.layers.1"),
    ],
)
def test_base_that_does_not_fit_is_rejected(language, tmp_path, damage, message):
    damage(tmp_path / "base")

    with pytest.raises(BadInput, match=message) as error:
        language(base=str(tmp_path / "base")).training.build_model()

    assert error.value.remedy


def layers_without_prefix(folder):
    """Save weights without the prefix, like those of a model without a head."""
    save_base(folder, auto=AutoModel)
    edit_config(folder, num_hidden_layers=1)


def other_shape(folder):
    save_base(folder)
    edit_config(folder, intermediate_size=48)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (layers_without_prefix, "does not define, such as (model.)?layers.1"),
        (other_shape, "contains 6 weights whose shape differs from its config.json"),
    ],
)
def test_all_weights_below_a_new_head_must_fit(classes, tmp_path, damage, message):
    damage(tmp_path / "base")
    with pytest.raises(BadInput, match=message):
        classes(base=str(tmp_path / "base")).training.build_model()


def test_buffers_saved_by_older_versions_are_ignored(language, tmp_path):
    save_base(tmp_path / "base", GPT2)
    mask = torch.ones(1, 1, 64, 64)
    edit_weights(
        tmp_path / "base",
        lambda weights: weights.update(
            {f"transformer.h.0.attn.{name}": mask.clone() for name in ("bias", "masked_bias")}
        ),
    )
    assert language(base=str(tmp_path / "base")).training.build_model()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**LLAMA, "hidden_size": 30}, "model.config cannot be built"),
        ({**LLAMA, "vocab_size": 12}, "tokenizer has 64 tokens, the model's vocabulary 12"),
        ({**LLAMA, "max_position_embeddings": 47}, "sequence_length = 48: .* at most 47 tokens"),
        ({**GPT2, "n_positions": 16}, "sequence_length = 48: .* at most 16 tokens"),
    ],
)
def test_configuration_that_does_not_fit_is_rejected(language, config, message):
    with pytest.raises(BadInput, match=message) as error:
        language(config=config).training.build_model()

    assert error.value.remedy


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({**LLAMA, "hiden_size": 8}, r"model\.config\.hiden_size = 8: a llama model has no such"),
        ({"model_type": "lama"}, "model_type = 'lama': Transformers has no such model"),
    ],
)
def test_unknown_field_is_an_error_before_there_is_data_and_in_training(language, fields, message):
    made = language(config=fields)
    with pytest.raises(ConfigError, match=message):
        check_task(made.config)
    with pytest.raises(ConfigError, match=message):
        made.training.build_model()


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"tune.space": {"model.config.hiden_size": {"choices": [32, 64]}}}, "tune.space"),
        ({"ablation.changes": {"wide": {"model.config.hiden_size": 64}}}, "ablation.changes.wide"),
        (
            {"cross_validation.compare": {"wide": {"model.config.hiden_size": 64}}},
            "cross_validation.compare.wide",
        ),
    ],
)
def test_field_of_a_study_that_the_model_does_not_have_is_named_before_any_trial(given, field):
    """Each trial failed on it, or trained the same model."""
    config = load("causal-lm", given.items())
    with pytest.raises(ConfigError) as refused:
        check_task(config)
    (found,) = refused.value.problems
    assert found.field == f"{field}.model.config.hiden_size"
    assert "hidden_size" in found.remedy
    known = {"tune.space": {"model.config.hidden_size": {"choices": [48, 96]}}}
    check_task(load("causal-lm", known.items()))


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (
            {"tune.space": {"model.config.hidden_size": {"choices": [48, 97]}}},
            "tune.space.model.config.hidden_size.choices.1",
        ),
        (
            {"tune.space": {"model.config.hidden_size": {"low": 48, "high": 97}}},
            "tune.space.model.config.hidden_size.high",
        ),
        (
            {"ablation.changes": {"wide": {"model.config.hidden_size": 97}}},
            "ablation.changes.wide",
        ),
    ],
)
def test_value_that_the_model_refuses_is_named_before_any_trial(given, field):
    with pytest.raises(ConfigError) as refused:
        check_task(load("causal-lm", given.items()))
    (found,) = refused.value.problems
    assert (found.field, found.value) == (field, "97")
    assert "The hidden size (97) is not a multiple" in found.message


def test_value_that_needs_another_field_of_the_space_is_taken():
    space = {
        "model.config.hidden_size": {"choices": [48, 64]},
        "model.config.num_attention_heads": {"choices": [4, 6]},
    }
    check_task(load("causal-lm", {"tune.space": space}.items()))


def test_known_fields_are_found_in_the_source_of_transformers(monkeypatch):
    """Importing it takes seconds, and every command looks at a configuration."""
    monkeypatch.setattr(AutoConfig, "for_model", None)
    for name in preset_names():
        model = load(name).model
        own = model.framework != "pytorch"
        assert own or model.base or not [*unknown_fields(model.config)]


def test_roberta_takes_fewer_tokens_than_it_has_positions(classes):
    """Its positions start after the padding index."""
    model = classes(config=ROBERTA).training.build_model()
    model(input_ids=torch.full((1, 32), 5))

    with pytest.raises(BadInput, match="at most 32 tokens"):
        classes(config=ROBERTA, sequence_length=33).training.build_model()

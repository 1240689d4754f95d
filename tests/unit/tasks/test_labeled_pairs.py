"""Pairs of texts are encoded, learned, scored and served as Transformers does it."""

from __future__ import annotations

import pyarrow as pa
import pytest
import torch
from tokenizers import processors
from transformers import AutoConfig, AutoModelForSequenceClassification, pipeline

from steadytrain.components.preprocess.model import train_tokenizer
from steadytrain.components.shared.config import DataConfig
from steadytrain.components.shared.config.data_sections import Columns
from steadytrain.components.tasks.encoding.base import Content, Fitted
from steadytrain.components.tasks.encoding.labeled_text import LabeledTextEncoder
from steadytrain.components.tasks.encoding.tokens import load_tokenizer
from steadytrain.components.tasks.scoring.classification import score_classification
from steadytrain.components.tasks.sequence_classification import collate_padded
from steadytrain.components.tasks.text import head_logits

from support.data import sentence
from support.weight_digests import BERT

LIMIT = 24
TEXTS = [
    ("one two three", "four five"),
    ("short", sentence(1) * 9),
    (sentence(2) * 9, "short"),
    (sentence(3) * 5, sentence(4) * 5),
    ("ends with 'quotes' and \"more\"", "\u00e9t\u00e9\n\ttwo lines"),
]
END = "<|endoftext|>"
FAMILIES = {
    "BERT": f"{END}:0 $A:0 {END}:0 $B:1 {END}:1",
    "RoBERTa": f"{END}:0 $A:0 {END}:0 {END}:0 $B:0 {END}:0",
    "trained": "",
}
DATA = DataConfig(
    source=["x"],
    task="sequence_classification",
    columns=Columns(text="a", text_pair="b"),
    sequence_length=LIMIT,
)
ENCODER = LabeledTextEncoder(DATA)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    made = tmp_path_factory.mktemp(request.param) / "tokenizer"
    texts = [text for pair in TEXTS for text in pair]
    tokenizer = train_tokenizer(texts, ENCODER.tokenizer, vocab_size=300)
    if template := FAMILIES[request.param]:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{END} $A {END}", pair=template, special_tokens=[(END, 0)]
        )
    if request.param == "BERT":
        tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    tokenizer.save_pretrained(made)
    return made


def contents():
    rows = [{"a": first, "b": second, "label": "no"} for first, second in TEXTS]
    return [ENCODER.read(row) for row in rows]


def encoded(folder):
    fitted = Fitted(folder, ("no", "yes"), frozenset({"no", "yes"}), folder)
    return ENCODER.row_encoder(fitted).encode(contents())


def test_tokens_are_those_of_transformers(folder):
    plain = load_tokenizer(folder)
    for found, (first, second) in zip(encoded(folder), TEXTS, strict=True):
        expected = plain(first, second, truncation=True, max_length=LIMIT)
        (row,) = found.rows
        assert row.values["input_ids"].tolist() == expected["input_ids"]
        types = expected.get("token_type_ids", [0] * len(expected["input_ids"]))
        assert row.values["token_type_ids"].tolist() == types
        assert found.tokens == len(plain(first, second)["input_ids"])
        assert found.truncated == (found.tokens > LIMIT)
        assert set(row.values) == set(ENCODER.schema.names)
    assert [found.truncated for found in encoded(folder)].count(True) == 4


def test_a_trained_tokenizer_puts_its_end_token_between_the_texts(folder):
    ids = load_tokenizer(folder)(*TEXTS[0])["input_ids"]
    assert ids[0] == ids[-1] == 0
    assert ids.count(0) >= 3


@pytest.fixture(scope="module")
def model(folder):
    torch.manual_seed(0)
    config = AutoConfig.for_model(**BERT, vocab_size=300, id2label={0: "no", 1: "yes"})
    return AutoModelForSequenceClassification.from_config(config).eval()


def test_training_scores_and_serving_agree_with_transformers(folder, model):
    plain = load_tokenizer(folder)
    firsts, seconds = map(list, zip(*TEXTS, strict=True))
    inputs = plain(
        firsts, seconds, truncation=True, max_length=LIMIT, padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        expected = model(**inputs).logits
        rows = [found.rows[0].values for found in encoded(folder)]
        batch = collate_padded(rows, plain.pad_token_id)
        assert ("token_type_ids" in batch) == ("token_type_ids" in inputs)
        torch.testing.assert_close(head_logits(model, batch), expected)
    stored = pa.table(
        {"content": [one.text for one in contents()], "label": ["no"] * len(TEXTS)},
    )
    columns = ENCODER.test_columns(stored)
    records = pa.table({"id": firsts, **columns})
    components = {"model": model, "tokenizer": plain}
    scores = score_classification(
        components, records, labels=("no", "yes"), batch_size=2, max_length=LIMIT
    )
    chances = torch.tensor(scores["probabilities"].to_pylist())
    torch.testing.assert_close(chances, expected.softmax(-1))
    served = pipeline("text-classification", model=model, tokenizer=plain, top_k=None)
    given = [{"text": first, "text_pair": second} for first, second in TEXTS[:1]]
    found = {item["label"]: item["score"] for item in served(given, truncation=True)[0]}
    torch.testing.assert_close(
        torch.tensor([found["no"], found["yes"]]), expected.softmax(-1)[0], check_dtype=False
    )


def test_no_test_records_have_the_columns_too():
    empty = pa.table({"content": pa.array([], pa.string()), "label": pa.array([], pa.string())})
    assert set(ENCODER.test_columns(empty)) == {"text", "text_pair", "label"}


def test_both_texts_are_needed():
    assert isinstance(contents()[0], Content)
    with pytest.raises(Exception, match="b is absent or null"):
        ENCODER.read({"a": "x", "label": "no"})

"""Score language models: each token of the text once, over the same bytes for any tokenizer."""

import json
import math

import numpy as np
import pyarrow as pa
import pytest
import torch

from steadytrain.components.evaluate.metric import Scores, point_values
from steadytrain.components.shared.records import DataRecord, SideRecord
from steadytrain.components.tasks.encoding.base import Content
from steadytrain.components.tasks.encoding.chat import ChatRows
from steadytrain.components.tasks.encoding.tokens import encode_chat, load_tokenizer, windows
from steadytrain.components.tasks.scoring import language
from steadytrain.components.tasks.scoring.language import score_frequencies, score_language

from support.declared import assert_declared
from support.tiny import TEXTS, make_language_model

CHAT = [
    {"role": "user", "content": "What is a stack?"},
    {"role": "assistant", "content": "A list that grows at one end. Voilà."},
    {"role": "user", "content": "And a queue?"},
    {"role": "assistant", "content": "One that shrinks at the other."},
]


def text_records(texts=TEXTS):
    return pa.table(
        {
            "id": [f"id-{index}" for index in range(len(texts))],
            "text": list(texts),
            "slice": ["code"] * len(texts),
        }
    )


def chat_records(chats):
    return pa.table(
        {"id": [str(i) for i in range(len(chats))], "messages": [json.dumps(c) for c in chats]}
    )


def score(model, tokenizer, records, *, batch_size=3, max_length=128):
    return score_language(
        {"model": model, "tokenizer": tokenizer},
        records,
        batch_size=batch_size,
        max_length=max_length,
    )


@torch.inference_mode()
def direct_losses(model, ids, context):
    """Return the loss of each token after the first, each from its own forward pass."""
    found = []
    for place in range(1, len(ids)):
        logits = model(input_ids=torch.tensor([ids[context(place) : place]])).logits[0, -1]
        found.append(-logits.double().log_softmax(-1)[ids[place]].item())
    return found


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_losses_equal_direct_computation(kind, tokenizer):
    model = make_language_model(kind, len(tokenizer))
    scores = score(model, tokenizer, text_records())
    for row, text in enumerate(TEXTS):
        ids = [0, *tokenizer(text, split_special_tokens=True)["input_ids"]]
        expected = direct_losses(model, ids, lambda place: 0)
        assert scores["loss"][row].as_py() == pytest.approx(sum(expected), rel=1e-5)
        assert scores["targets"][row].as_py() == len(expected)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_windows_of_long_texts_score_each_token_once(kind, tokenizer):
    length, step = 8, 7
    model = make_language_model(kind, len(tokenizer), positions=length)
    scores = score(model, tokenizer, text_records(), max_length=128)
    for row, text in enumerate(TEXTS):
        ids = [0, *tokenizer(text, split_special_tokens=True)["input_ids"]]
        expected = direct_losses(model, ids, lambda place: (place - 1) // step * step)
        assert scores["loss"][row].as_py() == pytest.approx(sum(expected), rel=1e-5)
        assert scores["targets"][row].as_py() == len(ids) - 1


def test_batching_and_blocks_change_nothing(tokenizer, monkeypatch):
    model = make_language_model("llama", len(tokenizer))
    together = score(model, tokenizer, text_records(), batch_size=8)
    monkeypatch.setattr(language, "_RECORDS_AT_ONCE", 2)
    apart = score(model, tokenizer, text_records(), batch_size=1)
    assert together.drop(["loss"]) == apart.drop(["loss"])
    np.testing.assert_allclose(together["loss"].to_numpy(), apart["loss"].to_numpy(), rtol=1e-5)


def test_tokenizers_that_differ_give_the_same_bytes(tokenizer, bytes_tokenizer):
    few, many = (
        score(make_language_model("llama", len(item)), item, text_records())
        for item in (tokenizer, bytes_tokenizer)
    )
    assert few["bytes"] == many["bytes"]
    assert few["bytes"].to_pylist() == [len(text.encode()) for text in TEXTS]
    assert sum(few["targets"].to_pylist()) < sum(many["targets"].to_pylist())
    # A byte tokenizer scores each byte of the text, and nothing else.
    assert many["targets"] == many["bytes"]


def test_score_columns_match_the_contract(tokenizer):
    scores = score(make_language_model("llama", len(tokenizer)), tokenizer, text_records())
    for task in ("causal_lm", "supervised_finetuning"):
        assert_declared(task, scores)
    assert scores.column_names == ["id", "group", "slice", "loss", "targets", "bytes"]
    assert scores["id"].to_pylist() == [f"id-{index}" for index in range(len(TEXTS))]
    assert scores["group"].to_pylist() == [None] * len(TEXTS)
    assert scores["slice"].to_pylist() == ["code"] * len(TEXTS)


def test_only_assistant_turns_are_scored(tokenizer):
    model = make_language_model("llama", len(tokenizer), positions=256)
    scores = score(model, tokenizer, chat_records([CHAT]), max_length=256)
    encoded = encode_chat(tokenizer, CHAT)
    ends = [i for i, (t, on) in enumerate(zip(encoded.input_ids, encoded.targets, strict=True))
            if on and t == tokenizer.eos_token_id]  # fmt: skip
    assert len(ends) == 2
    losses = direct_losses(model, encoded.input_ids, lambda place: 0)
    expected = [
        losses[place - 1] for place, on in enumerate(encoded.targets) if on and place not in ends
    ]
    assert scores["loss"][0].as_py() == pytest.approx(sum(expected), rel=1e-5)
    assert scores["targets"][0].as_py() == len(expected)
    said = [item["content"] for item in CHAT if item["role"] == "assistant"]
    assert scores["bytes"][0].as_py() == sum(len(text.encode()) for text in said)


@pytest.mark.slow
def test_long_chats_are_scored_in_the_windows_that_are_learned(tokenizer, tmp_path):
    """Each target once, with up to half of a window before it."""
    long = [*CHAT, *({**turn, "content": turn["content"] * 3} for turn in CHAT)]
    model, length = make_language_model("llama", len(tokenizer)), 48
    with torch.no_grad():
        model.lm_head.weight.mul_(40)
    tokenizer.save_pretrained(tmp_path)
    (learned,) = ChatRows(tmp_path, length, "window").encode([Content(json.dumps(long))])
    assert len(learned.rows) > 3
    expected = 0.0
    for row in learned.rows:
        ids, targets = row.values["input_ids"].tolist(), row.values["targets"].tolist()
        losses = direct_losses(model, ids, lambda place: 0)
        pairs = zip(ids[1:], targets[1:], losses, strict=True)
        expected += sum(loss for token, target, loss in pairs if target and token)
    scores = score(model, tokenizer, chat_records([long]), max_length=length)
    # The last window may begin one token earlier, since the end of a turn is not scored.
    assert scores["loss"][0].as_py() == pytest.approx(expected, rel=1e-3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(language, "chat_windows", windows)
        other = score(model, tokenizer, chat_records([long]), max_length=length)
    assert other["loss"][0].as_py() != pytest.approx(expected, rel=1e-3)


def test_chat_without_assistant_text_has_no_targets(tokenizer):
    model = make_language_model("llama", len(tokenizer))
    scores = score(model, tokenizer, chat_records([CHAT[:1], CHAT[:2]]))
    assert scores["targets"].to_pylist()[0] == 0
    assert scores["loss"].to_pylist()[0] == 0.0
    assert scores["targets"].to_pylist()[1] > 0


def prepared(folder, tokenizer, rows):
    tokenizer.save_pretrained(folder / "tokenizer")
    table = pa.table(
        {
            "input_ids": pa.array([ids for ids, _ in rows], pa.list_(pa.int32())),
            "targets": pa.array([targets for _, targets in rows], pa.list_(pa.int8())),
        }
    )
    with (
        pa.OSFile(str(folder / "train.arrow"), "wb") as sink,
        pa.ipc.new_file(sink, table.schema) as out,
    ):
        out.write_table(table, max_chunksize=1)
    side = SideRecord(shards=["train.arrow"], rows=len(rows), documents=len(rows))
    return DataRecord(
        folder=str(folder), fingerprint="f", task="causal_lm", sides={"train": side},
        test_records="test.arrow", split_digest="s", tokenizer="tokenizer",
    )  # fmt: skip


def test_unigram_baseline_counts_the_training_targets_with_add_one(tmp_path, bytes_tokenizer):
    size = len(load_tokenizer_from(bytes_tokenizer, tmp_path))
    a, b = bytes_tokenizer("ab")["input_ids"]
    data = prepared(tmp_path, bytes_tokenizer, [([a, a, b], [0, 1, 1]), ([a, b], [1, 0])])
    found = point_values(Scores.of(score_frequencies(data, text_records(["aab"]))))
    total = 3 + size
    expected = -(2 * math.log(3 / total) + math.log(2 / total))
    assert found["loss"] == pytest.approx(expected / 3)
    assert found["bits_per_byte"] == pytest.approx(expected / 3 / math.log(2))


def load_tokenizer_from(tokenizer, folder):
    tokenizer.save_pretrained(folder / "copy")
    return load_tokenizer(folder / "copy")


def test_no_baseline_without_scored_tokens(tmp_path, tokenizer):
    data = prepared(tmp_path, tokenizer, [([1, 2], [0, 1])])
    assert score_frequencies(data, chat_records([CHAT[:1]])) is None

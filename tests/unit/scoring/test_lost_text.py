"""A tokenizer that loses text must not make its model look better."""

import math

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from unit.scoring.test_language import CHAT, chat_records, score, text_records

from steadytrain.components.tasks.scoring.language import NATS_A_BYTE, lost_nats, scored_documents

from support.tiny import TEXTS, make_language_model


def words(*known, normalizer=None):
    vocabulary = {word: index for index, word in enumerate(["<|end|>", "[UNK]", *known])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if normalizer:
        tokenizer.normalizer = normalizer
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", unk_token="[UNK]"
    )


def lost_bytes(tokenizer, record):
    (encoded,) = scored_documents(tokenizer, [record])
    return lost_nats(tokenizer, record, encoded) / NATS_A_BYTE


@pytest.mark.parametrize("text", [*TEXTS, "", "naïve [UNK] \u200b\n\ttabs  and spaces 漢字 🎉"])
def test_bytes_lose_nothing(text, tokenizer, bytes_tokenizer):
    for lossless in (tokenizer, bytes_tokenizer):
        assert lost_bytes(lossless, {"text": text}) == 0


def test_scored_chat_loses_no_text(tokenizer):
    assert lost_bytes(tokenizer, {"messages": CHAT}) == 0


def test_unknown_words_are_lost():
    assert lost_bytes(words("the"), {"text": "the cat, the [UNK]"}) == pytest.approx(9 + 2)


def test_normalized_text_is_lost():
    lower = words("the", "café", normalizer=normalizers.Lowercase())
    assert lost_bytes(lower, {"text": "The café"}) == pytest.approx(1)
    plain = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
    assert lost_bytes(words("the", "cafe", normalizer=plain), {"text": "the café"}) == 2


def test_normalizer_that_drops_everything_is_not_rewarded():
    nothing = words("the", normalizer=normalizers.Replace("cat", ""))
    assert lost_bytes(nothing, {"text": "cat"}) == 3


@pytest.mark.parametrize("records", [text_records(), chat_records([CHAT])], ids=["text", "chat"])
def test_one_word_tokenizer_scores_worse_than_bytes(records, bytes_tokenizer):
    def bits_per_byte(tokenizer):
        scores = score(make_language_model("llama", len(tokenizer)), tokenizer, records)
        return sum(scores["loss"].to_pylist()) / sum(scores["bytes"].to_pylist()) / math.log(2)

    # Untrained models need about log2(257) bits per byte. Raw text needs 8.
    assert bits_per_byte(words("the")) > 5
    assert bits_per_byte(bytes_tokenizer) == pytest.approx(8.05, abs=0.5)

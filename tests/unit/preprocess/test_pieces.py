from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, trainers
from tokenizers import pre_tokenizers as split

from steadytrain.components.shared import bounded
from steadytrain.components.tasks.encoding import plain_text
from steadytrain.components.tasks.encoding.plain_text import PieceEncoder

LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA.replace("{1,3}", "")
LEARNED = ["it's don't we'll I'd 12345 foo(bar)  # héllo\n\treturn  x\r\n", "слово 一二三 <tool>"]
# What the expressions treat specially, and characters that libraries may classify differently.
ODD = [
    *("'s", "'LL", " '", "' ", "  ", "\n", "\r\n", "\t", "\x0b", "\x1c", "\x1f", "\x85", "\x7f"),
    *("a", "Z", "_", "9", "123", ".", "\u00e9", "e\u0301", "\u0301", "\u00df", "\u017f", "\u212a"),
    *("\u4e00", "\u00bd", "\u2167", "\u0663", "\u00a0", "\u2003", "\u2028", "\u200b", "\ufeff"),
    *("\U0001f600", "\U00011f50", "слово ", "<|endoftext|>", "<tool>", " <tool> "),
]


def expression(pattern: str) -> Any:
    byte_level = split.ByteLevel(add_prefix_space=False, use_regex=False)
    return split.Sequence([split.Split(Regex(pattern), "isolated"), byte_level])


def make(splitting: Any, *, normalizer: Any = None, dropout: float | None = None) -> Tokenizer:
    made = Tokenizer(models.BPE(dropout=dropout))
    made.pre_tokenizer = splitting
    if normalizer is not None:
        made.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=split.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(LEARNED, trainer)
    made.add_tokens([AddedToken("<tool>", special=False, lstrip=True)])
    return made


GPT2 = make(split.ByteLevel(add_prefix_space=False))
KNOWN = {
    "gpt2": GPT2,
    "llama": make(expression(LLAMA)),
    "qwen": make(expression(QWEN), normalizer=normalizers.NFC()),
}
UNKNOWN = {
    "prefix": make(split.ByteLevel(add_prefix_space=True)),
    "expression": make(expression(LLAMA.replace("{1,3}", "{1,2}"))),
    "whitespace": make(split.Whitespace()),
    "lowercase": make(split.ByteLevel(add_prefix_space=False), normalizer=normalizers.Lowercase()),
}


def copy(tokenizer: Tokenizer) -> Tokenizer:
    return Tokenizer.from_str(tokenizer.to_str())


def expected(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    own = copy(tokenizer)
    own.encode_special_tokens = True
    return [own.encode(text, add_special_tokens=False).ids for text in texts]


def encoded(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [found.tolist() for found in PieceEncoder(copy(tokenizer)).encode(texts)]


@pytest.mark.parametrize("name", [*KNOWN, *UNKNOWN])
@given(parts=st.lists(st.sampled_from(ODD) | st.text(max_size=6), max_size=30))
def test_tokens_match_the_library(name: str, parts: list[str]) -> None:
    tokenizer = (KNOWN | UNKNOWN)[name]
    texts = ["".join(parts), "".join(part for part in parts if part.isascii())]
    assert encoded(tokenizer, texts) == expected(tokenizer, texts)


@pytest.mark.parametrize("name", [*KNOWN, *UNKNOWN])
def test_supported_tokenizers_are_recognized(name: str) -> None:
    asked: list[str] = []

    class Watched(PieceEncoder):
        def _by_pieces(self, text: str) -> bytes | None:
            found = super()._by_pieces(text)
            if found is None:
                asked.append(text)
            return found

    texts = ["a plain text", "a <tool> b"]
    Watched(copy((KNOWN | UNKNOWN)[name])).encode(texts)
    assert asked == ([texts[1]] if name in KNOWN else texts)


def test_added_tokens_are_found_as_they_are_normalized() -> None:
    tokenizer = make(split.ByteLevel(add_prefix_space=False), normalizer=normalizers.NFKC())
    tokenizer.add_tokens([AddedToken("\ufb01", normalized=True)])
    texts = ["finally", "a \ufb01ne day", "self"]
    assert encoded(tokenizer, texts) == expected(tokenizer, texts)


def test_dropout_stays_random() -> None:
    tokenizer = make(split.ByteLevel(add_prefix_space=False), dropout=0.5)
    text = "return " * 50
    once, twice = encoded(tokenizer, [text])[0], encoded(tokenizer, [text])[0]
    assert once != twice


@pytest.mark.parametrize(("repeated", "asked"), [(True, 0), (False, 4)])
def test_non_repeating_texts_go_to_the_library(
    monkeypatch: pytest.MonkeyPatch, repeated: bool, asked: int
) -> None:
    monkeypatch.setattr(plain_text, "_TRIAL", 90)
    encoder = PieceEncoder(copy(GPT2))
    texts = [
        " ".join(f"{'ab' if repeated else chr(97 + text)}{'c' * word}" for word in range(10))
        for text in range(14)
    ]
    found = [encoder.encode([text])[0].tolist() for text in texts]
    assert found == expected(GPT2, texts)
    assert sum(encoder._by_pieces(text) is None for text in texts[10:]) == asked


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "MOST", 8)
    encoder = PieceEncoder(copy(GPT2))
    texts = [f"word{'x' * number} {'y' * 100}" for number in range(40)]
    found = [tokens.tolist() for tokens in encoder.encode(texts)]
    assert found == expected(GPT2, texts)
    assert 0 < len(encoder._tokens) <= 8
    assert all(len(piece) <= 48 for piece in encoder._tokens)

from __future__ import annotations

from unicodedata import normalize

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from rensa import RMinHash

from steadytrain.components.preprocess import boilerplate, profile
from steadytrain.components.preprocess.boilerplate import PERMUTATIONS, ascii_runs, shingles, sign
from steadytrain.components.preprocess.profile import Tally
from steadytrain.components.preprocess.validate import Checked
from steadytrain.components.shared import bounded

ASCII = "".join(map(chr, range(128)))
TEXTS = st.lists(
    st.text(alphabet=ASCII, min_size=1, max_size=60)
    | st.text(alphabet="aB_9 .\x1c\n\u00e9\u0130\u03a3\u4e00\u0301", min_size=1, max_size=60),
    max_size=6,
)
KIND = "[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|\\w+|[^\\w\\s]+"


def plainly_signed(text: str) -> list[int]:
    """Compute the signature from its definition: the set of shingles, without a cache."""
    words = boilerplate.re.findall(KIND, normalize("NFC", text).lower()) or [text]
    hashes = RMinHash.hash_token_sets([words])[0]
    width = min(5, len(words))
    hashed = set()
    for start in range(len(words) - width + 1):
        total = sum(
            value * pow(0x9E3779B97F4A7C15, place, 2**64)
            for place, value in enumerate(hashes[start : start + width])
        )
        total %= 2**64
        hashed.add(total ^ (total >> 29))
    flat = np.array(sorted(hashed), dtype=np.uint64)
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(
        flat, np.array([0, len(flat)], dtype=np.uint64), PERMUTATIONS, 1
    )
    found: list[int] = matrix.to_rows()[0]
    return found


@given(texts=TEXTS)
@example(texts=["a b c d e f g a b c d e f g", "a b", "A B", "x", "a b c d e"])
def test_signatures_match_the_definition(texts: list[str]) -> None:
    assert sign(*shingles(texts)).tolist() == [plainly_signed(text) for text in texts]


@given(texts=TEXTS)
def test_profile_counts_the_same_words_with_and_without_known_runs(texts: list[str]) -> None:
    records = [
        Checked(bytes([number]), text, None, None, None) for number, text in enumerate(texts)
    ]
    shared, own = Tally(), Tally()
    shared.count(records, ascii_runs(texts), list)
    own.count(records, [None] * len(texts), list)
    assert shared.words.tolist() == own.words.tolist()
    words = sum(len(profile._WORD.findall(text)) for text in texts)
    assert shared.words.sum() == words


def test_remembered_hashes_are_bounded(monkeypatch) -> None:
    monkeypatch.setattr(bounded, "MOST", 8)
    known = bounded.Remembered(boilerplate._hash)
    monkeypatch.setattr(boilerplate, "_KNOWN", known)
    texts = [f"word{number} {'y' * 100} again" for number in range(40)]
    assert sign(*shingles(texts)).tolist() == [plainly_signed(text) for text in texts]
    assert 0 < len(known) <= 8
    assert all(len(run) <= 48 for run in known)

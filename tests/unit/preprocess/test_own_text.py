from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steadytrain.components.preprocess import boilerplate
from steadytrain.components.preprocess.boilerplate import (
    MANY,
    Sample,
    shingles,
    to_sample,
    unshared_shingles,
)
from steadytrain.components.preprocess.duplicates import REASONS
from steadytrain.components.preprocess.inputs import find_inputs
from steadytrain.components.preprocess.parallel import Workers
from steadytrain.components.preprocess.quarantine import Quarantine
from steadytrain.components.preprocess.split import content_id
from steadytrain.components.preprocess.spool import Spool
from steadytrain.components.preprocess.survey import survey
from steadytrain.components.tasks.base import open_encoder

from support.data import write_jsonl

Rows = list[dict[str, Any]]
VOCABULARY = [f"word{number}" for number in range(3000)]
CHATS = {"task": "supervised_finetuning"}
LABELED = {"task": "sequence_classification"}
PREFERENCE = {"task": "preference"}


def words(seed: int, count: int) -> str:
    return " ".join(random.Random(seed).choices(VOCABULARY, k=count))


SYSTEM, SHARED = words(1, 488), words(2, 200)


def chat(seed: int, system: str = "") -> dict[str, Any]:
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": words(1000 + seed, 12)},
        {"role": "assistant", "content": words(5000 + seed, 15)},
    ]
    return {"messages": messages if system else messages[1:]}


def pair(seed: int, **changed: str) -> dict[str, Any]:
    told = {
        "prompt": words(seed, 40),
        "chosen": words(seed + 1, 40),
        "rejected": words(seed + 2, 9),
    }
    return told | changed


def left_out(configure: Any, folder: Path, rows: Rows, data: Mapping[str, Any]) -> dict[str, int]:
    """Return how many records are set aside, by reason. None is defective."""
    config = configure(write_jsonl(folder / "x.jsonl", rows), **data)
    inputs = find_inputs(config.data)
    spool, quarantine = (
        Spool(folder / "spool", inputs.bytes),
        Quarantine(folder / "quarantine.jsonl"),
    )
    found = survey(
        config,
        open_encoder(config.data),
        inputs,
        spool=spool,
        quarantine=quarantine,
        scratch=folder,
        workers=Workers(1),
        progress=lambda *_: None,
        warn=lambda message: None,
    )
    quarantine.close()
    assert not quarantine.counts
    assert len(found.findings.codes) == len(rows)
    return dict(Counter(REASONS[code] for code in found.findings.codes if code))


DIFFERENT = {
    "system message": (
        CHATS,
        [*(chat(seed, SYSTEM) for seed in range(400)), *(chat(seed) for seed in range(400, 520))],
    ),
    "only chats with one system message": (CHATS, [chat(seed, SYSTEM) for seed in range(60)]),
    "instruction": (
        CHATS,
        [
            {"prompt": f"{SHARED} {words(seed, 10)}", "completion": ("yes", "no")[seed % 2]}
            for seed in range(100, 160)
        ],
    ),
    "one prompt, different answers": (
        CHATS,
        [{"prompt": SHARED, "completion": words(seed, 15)} for seed in range(100, 160)],
    ),
    "one prompt, few different answers": (
        CHATS,
        [
            {"prompt": f"{SHARED} {words(number, 9)}", "completion": words(seed, 9)}
            for number in range(20)
            for seed in range(number * 100, number * 100 + 3)
        ],
    ),
    "200 words of 220": (
        {},
        [{"text": f"{words(seed, 20)} {SHARED}"} for seed in range(100, 400)],
    ),
    "in the middle": (
        {},
        [{"text": f"{SHARED} {words(seed, 8)} {SYSTEM}"} for seed in range(100, 160)],
    ),
    "labels": (
        LABELED,
        [
            {"text": f"{words(seed, 9)} {SHARED}", "label": "ab"[seed % 2]}
            for seed in range(100, 160)
        ],
    ),
    "two texts with a footer and different labels": (
        LABELED,
        [
            {"text": f"{words(seed // 2, 40)} {seed % 2}", "label": "ab"[seed % 2]}
            for seed in range(60)
        ],
    ),
    "preferred answers": (PREFERENCE, [pair(seed, prompt=SHARED) for seed in range(100, 160)]),
    "preferred the other way round": (
        PREFERENCE,
        [
            pair(seed, **dict(zip(order, (words(seed, 30), words(seed + 5000, 30)), strict=True)))
            for seed in range(100, 130)
            for order in (("chosen", "rejected"), ("rejected", "chosen"))
        ],
    ),
    "one text, different partners": (
        {"task": "text_embedding"},
        [{"prompt": SHARED, "completion": words(seed, 12)} for seed in range(100, 160)],
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_records_are_kept(tmp_path: Path, configure: Any, name: str) -> None:
    data, rows = DIFFERENT[name]
    assert left_out(configure, tmp_path, rows, data) == {}


def near_copies(rows: Rows, column: str) -> Rows:
    """Return records with one more word in a column."""
    return [{**row, column: f"{row[column]} again"} for row in rows]


PROMPTS: Rows = [
    {"prompt": f"{SHARED} {words(seed, 40)}", "completion": words(seed + 1, 40)}
    for seed in range(100, 900, 20)
]
SIGNED: Rows = [
    {"text": f"{words(seed, 60)} {SHARED}", "label": "ab"[seed % 2]} for seed in range(100, 140)
]
PAIRS: Rows = [pair(seed, prompt=f"{SHARED} {words(seed, 50)}") for seed in range(100, 900, 20)]
REPEATED = {
    "texts": ({}, [{"text": words(seed, 300)} for seed in range(40)], "text"),
    "texts with a footer": (LABELED, SIGNED, "text"),
    "prompts": (CHATS, PROMPTS, "prompt"),
    "answers": (CHATS, PROMPTS, "completion"),
    "preferences": (PREFERENCE, PAIRS, "chosen"),
}


@pytest.mark.parametrize("name", REPEATED)
def test_near_duplicates_are_found(tmp_path: Path, configure: Any, name: str) -> None:
    data, rows, column = REPEATED[name]
    found = left_out(configure, tmp_path, [*rows, *near_copies(rows, column)], data)
    assert found.keys() <= {"near_duplicate", "leakage"}
    assert sum(found.values()) == len(rows)


def test_chats_with_different_system_messages_are_near_duplicates(
    tmp_path: Path, configure: Any
) -> None:
    rows = [chat(seed, words(seed + side, 50)) for seed in range(40) for side in (100, 200)]
    found = left_out(configure, tmp_path, rows, CHATS)
    assert found.keys() <= {"near_duplicate", "leakage"}
    assert sum(found.values()) == 40


def test_many_copies_that_differ_in_a_word_are_near_duplicates(
    tmp_path: Path, configure: Any
) -> None:
    text = words(7, 300).split()
    copies = [" ".join([*text[:place], "other", *text[place + 1 :]]) for place in range(9, 290, 9)]
    rows = [{"text": copy} for copy in copies]
    rows += [{"text": words(seed, 60)} for seed in range(100, 160)]
    found = left_out(configure, tmp_path, rows, {})
    assert found.keys() <= {"near_duplicate", "leakage"}
    assert sum(found.values()) == len(copies) - 1


def test_copies_of_a_record_do_not_make_its_text_shared() -> None:
    sample = Sample()
    flat, offsets = shingles([words(1, 50)] * MANY)
    identities = [content_id(words(1, 50))] * MANY
    sample.add(to_sample(identities, flat, offsets, sample.limit))
    assert not len(sample.shared())
    others = [f"{words(1, 50)} {number}" for number in range(MANY)]
    flat, offsets = shingles(others)
    sample.add(to_sample([content_id(text) for text in others], flat, offsets, sample.limit))
    assert set(sample.shared()) == set(shingles([words(1, 50)])[0])


def test_sample_is_bounded_and_independent_of_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boilerplate, "_SAMPLED", 5000)
    texts = [f"{words(seed, 20)} {words(0, 30)}" for seed in range(1, 500)]
    found = []
    for order in (texts, texts[::-1], sorted(texts)):
        sample = Sample()
        for start in range(0, len(order), 37):
            chunk = order[start : start + 37]
            flat, offsets = shingles(chunk)
            identities = [content_id(text) for text in chunk]
            sample.add(to_sample(identities, flat, offsets, sample.limit))
            assert sum(map(len, sample._found.values())) == sample._size <= 5000
        assert sample.limit < 1 << 64
        found.append(sample.shared().tolist())
    assert found[0] == found[1] == found[2]
    assert set(shingles([words(0, 30)])[0].tolist()) == set(found[0])


def test_shared_text_is_left_out_of_texts_with_a_passage_of_their_own() -> None:
    footer = words(1, 30)
    texts = [f"{words(2, 9)} {footer}", footer, f"{footer} word", words(3, 3)]
    flat, offsets = shingles(texts)
    left, edges, owning = unshared_shingles(flat, offsets, np.unique(shingles([footer])[0]))
    assert owning.tolist() == [True, False, False, True]
    sizes = np.diff(offsets.astype(np.int64)).tolist()
    assert np.diff(edges.astype(np.int64)).tolist() == [9, *sizes[1:]]
    assert left[:9].tolist() == flat[:9].tolist()
    assert left[9:].tolist() == flat[sizes[0] :].tolist()

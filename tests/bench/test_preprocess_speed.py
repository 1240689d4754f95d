"""Preprocessing in MB per second, compared with datatrove's MinHash plus `datasets`.

Both read the same JSON lines (Python sources), remove near duplicates, tokenize with the same
tokenizer, and write, with two worker processes. Ours also checks each record, splits, finds leaks,
packs, and signs its output. The peer is faster here than out of the box (see
`support/preparing_peer.py`). If spaCy is installed, the peer also runs in its default setup. They
run one after another in each round; the results are medians and ranges. Each result also includes
CPU time, which depends less on other load on the machine.

Run with `pytest -m bench tests/bench/test_preprocess_speed.py -s`. Set the size with
STEADYTRAIN_BENCH_ROUNDS and STEADYTRAIN_BENCH_MB.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import statistics
import sys
import time
from pathlib import Path

import pytest

from steadytrain.components.preprocess.model import train_tokenizer
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.tasks.encoding.plain_text import PlainTextEncoder
from steadytrain.components.tasks.encoding.tokens import load_tokenizer

from support import preparing_ours, preparing_peer
from support.corpora import source_texts, write_sources
from support.measured import Measured, measured

pytestmark = pytest.mark.bench
ROUNDS = int(os.environ.get("STEADYTRAIN_BENCH_ROUNDS", "3"))
MEGABYTES = float(os.environ.get("STEADYTRAIN_BENCH_MB", "60"))
WORDS = 16_384
SAMPLE = 3000
PEERS = ["words", *(["spacy"] if importlib.util.find_spec("spacy") else [])]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    texts = itertools.islice(source_texts(), SAMPLE)
    train_tokenizer(texts, PlainTextEncoder.tokenizer, vocab_size=WORDS).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    records = write_sources([folder / "a.jsonl", folder / "b.jsonl"], MEGABYTES)
    print(f"\n{MEGABYTES:.0f} MB, {records} records")
    return folder


def alone(tokenizer: Path) -> float:
    """Return the MB per second of the tokenizers library on one core, with the text in memory."""
    texts = list(itertools.islice(source_texts(), SAMPLE))
    backend = load_tokenizer(tokenizer).backend_tokenizer
    began = time.process_time()
    for start in range(0, len(texts), 300):
        backend.encode_batch_fast(texts[start : start + 300], add_special_tokens=False)
    return sum(len(text.encode()) for text in texts) / 1e6 / (time.process_time() - began)


def ours(folder: Path, source: Path, tokenizer: Path) -> Measured:
    folder.mkdir()
    config = from_mapping(
        {
            "name": "bench",
            "output": str(folder / "output"),
            "data": {"source": [str(source)], "sequence_length": 1024},
            "model": {
                "config": {"model_type": "gpt2", "vocab_size": WORDS},
                "tokenizer": str(tokenizer),
            },
        }
    )
    (folder / "config.yaml").write_text(config.to_yaml())
    return measured([sys.executable, preparing_ours.__file__, str(folder / "config.yaml")])


def peer(folder: Path, source: Path, tokenizer: Path, words: str) -> Measured:
    command = [sys.executable, preparing_peer.__file__, str(source), str(folder), str(tokenizer)]
    return measured([*command, words], TOKENIZERS_PARALLELISM="false")


@pytest.mark.timeout(7200)
def test_preprocessing_throughput(
    tmp_path: Path, source: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    found: dict[str, list[Measured]] = {kind: [] for kind in ("ours", *PEERS)}
    for turn in range(ROUNDS):
        for kind, each in found.items():
            folder = tmp_path / f"{kind}-{turn}"
            if kind == "ours":
                each.append(ours(folder, source, tokenizer))
            else:
                each.append(peer(folder, source, tokenizer, kind))
            shutil.rmtree(folder)
    print(f"\nmedians of {ROUNDS} (ranges); the tokenizers library alone on one core: ", end="")
    print(f"{alone(tokenizer):.1f} MB/s")
    for kind, each in found.items():
        print(f"{kind:>6}: {spread(each, 'seconds')} MB/s, {spread(each, 'cpu')} MB a CPU second,")
        print(f"{'':8}{max(one.peak for one in each) / 1e6:.0f} MB of memory at most")
    for kind in PEERS:
        pairs = list(zip(found["ours"], found[kind], strict=True))
        wall = statistics.median(other.seconds / own.seconds for own, other in pairs)
        cpu = statistics.median(other.cpu / own.cpu for own, other in pairs)
        print(f"ours against {kind}: {wall:.2f} x, by the CPU {cpu:.2f} x")


def spread(each: list[Measured], name: str) -> str:
    speeds = [MEGABYTES / getattr(one, name) for one in each]
    return f"{statistics.median(speeds):.2f} ({min(speeds):.2f} to {max(speeds):.2f})"

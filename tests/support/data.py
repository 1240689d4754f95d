"""Small data sets, and helpers to inspect the data prepared from them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from steadytrain.components.preprocess.split import SIDES, hash_position, held_out, sides_at
from steadytrain.components.shared.config import DataConfig
from steadytrain.components.shared.records import DataRecord, Side

WORDS = [
    *("river", "stone", "walks", "under", "bright", "copper", "evening", "while", "nobody"),
    *("counts", "seven", "small", "boats", "against", "morning", "frost", "because", "letters"),
    *("travel", "slowly", "between", "distant", "harbours", "quiet", "engines", "repeat"),
    *("patient", "answer", "until", "winter", "turns", "every", "window", "silver", "paper"),
]


def sentence(seed: int, words: int = 40) -> str:
    """Return text that is unique to the seed."""
    generator = random.Random(seed)
    return f"text {seed}: " + " ".join(generator.choices(WORDS, k=words))


def texts(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"text": sentence(seed)} for seed in range(start, start + count)]


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def quarantined(record: DataRecord) -> list[dict[str, Any]]:
    lines = record.path("quarantine.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def read_table(path: Path) -> pa.Table:
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_file(source).read_all()


def side_rows(record: DataRecord, side: Side) -> list[dict[str, Any]]:
    shards = [read_table(record.path(name)) for name in record.sides[side].shards]
    return [row for shard in shards for row in shard.to_pylist()]


def side_of(identity: bytes, group: str | None, data: DataConfig) -> Side:
    """Return the side of a record by its place alone."""
    places = np.array([hash_position(identity, group, data.split_salt)], np.uint64)
    return SIDES[sides_at(places, held_out(data))[0]]


def documents(record: DataRecord, side: Side) -> set[str]:
    index = read_table(record.path(record.sides[side].index))
    return {name for row in index["documents"].to_pylist() for name in row}

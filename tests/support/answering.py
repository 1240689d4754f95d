"""A rank that stores its share of a teacher's answers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from steadytrain.components.shared import chunks
from steadytrain.components.shared.batch import REPLICATED, BatchSettings
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.train.loop import teacher_answers
from steadytrain.components.train.loop.setup import set_up

TOGETHER, IN_A_FILE = 96, 288
"""Tokens that are answered at once, and tokens of a file: two and six rows of 48."""


def store_on_a_rank(config: Mapping[str, Any], data: Path, folder: Path) -> None:
    """Set up a rank in small files. Rank 1 writes how many columns each of its rows has."""
    chunks.ANSWERED_TOKENS, teacher_answers._FILE_TOKENS = TOGETHER, IN_A_FILE
    batch = BatchSettings(2, strategy=REPLICATED)
    parts = set_up(from_mapping(config), DataRecord.load(data), batch)
    if parts.rank == 1:
        columns = [len(parts.train[index]) for index in range(len(parts.train))]
        (folder / "columns").write_text(str(columns))

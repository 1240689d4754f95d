"""What shorter documents save: CPU time of a step whose documents are cut, against the same uncut.

Both have equally many tokens. Run with `pytest -m bench tests/bench/test_sequence_length.py -s`.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest
import torch

from steadytrain.components.memory.random_model import random_model
from steadytrain.components.memory.setting import Setting
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tasks.base import OpenTask
from steadytrain.components.tasks.documents import collate_packed
from steadytrain.components.techniques.curriculum import CurriculumConfig
from steadytrain.components.techniques.curriculum.order import SequenceLength

pytestmark = pytest.mark.bench
ROWS, PASSES, VOCABULARY = 2, 3, 8192
LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "max_position_embeddings": 4096,
}
SHARES = (0.25, 0.5)


@pytest.mark.parametrize("length", [1024, 2048])
def test_time_of_a_step(length: int):
    torch.set_num_threads(1)
    model = random_model(LLAMA, Setting(length=length, micro_batch=ROWS, cuda=False)).train()
    config = from_mapping(
        {"name": "bench", "data": {"source": ["unused"]}, "model": {"config": LLAMA}}
    )
    task = OpenTask(config, DataRecord.model_construct(labels=[])).training
    batches = {share: batch_of(length, share) for share in SHARES} | {1.0: batch_of(length, 1.0)}
    pairs: dict[float, list[float]] = {share: [] for share in SHARES}
    for _ in range(PASSES):
        for share in SHARES:
            cut, whole = (seconds(task, model, batches[each]) for each in (share, 1.0))
            pairs[share].append(cut / whole)
    for share, ratios in pairs.items():
        print(
            f"\n{length} tokens, cut at {share:g}: x {statistics.median(ratios):.2f} of CPU time "
            f"({min(ratios):.2f} to {max(ratios):.2f} over {PASSES} pairs)"
        )


def batch_of(length: int, share: float) -> dict[str, Any]:
    """Return rows of one document each, cut as in the first step of a curriculum."""
    rows = [
        {
            "input_ids": torch.randint(VOCABULARY, (length,)).numpy(),
            "targets": torch.ones(length).numpy(),
            "lengths": [length],
        }
        for _ in range(ROWS)
    ]
    if share < 1:
        config = CurriculumConfig(by="sequence_length", start=share)
        cutter = SequenceLength(config, length, batch=ROWS, steps=10)
        rows = [cutter.cut(row, 0) for row in rows]
    return collate_packed(rows)


def seconds(task: Any, model: torch.nn.Module, batch: dict[str, Any]) -> float:
    """Return the CPU time of a forward and a backward pass."""
    began = time.process_time()
    task.compute_loss(model, batch).total.backward()
    return time.process_time() - began

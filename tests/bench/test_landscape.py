"""What a point of the loss landscape costs, compared with scoring the same records once.

Run with `pytest -m bench tests/bench/test_landscape.py -s`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pyarrow as pa
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from steadytrain.components.evaluate.landscape import moving
from steadytrain.components.tasks.scoring.language import score_language

from support.tiny import make_tokenizer

pytestmark = pytest.mark.bench
POINTS, RECORDS, LENGTH = 5, 64, 128


def test_cost_of_a_point():
    torch.set_num_threads(1)
    tokenizer = make_tokenizer(200)
    architecture = AutoConfig.for_model(
        "llama",
        vocab_size=8192,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
    )
    model = AutoModelForCausalLM.from_config(architecture)
    text = tokenizer.decode([40 + index % 200 for index in range(LENGTH)])
    records = pa.table({"id": [str(index) for index in range(RECORDS)], "text": [text] * RECORDS})
    components = {"model": model, "tokenizer": tokenizer}

    def score() -> None:
        score_language(components, records, batch_size=8, max_length=LENGTH)

    score()
    with moving(model, 0) as move:
        scoring = statistics.median(seconds(score) for _ in range(POINTS))
        moved = statistics.median(seconds(lambda: move(0.5, 0.5)) for _ in range(POINTS))
    weights = sum(parameter.numel() for parameter in model.parameters())
    print(f"\n{weights / 1e6:.1f}M parameters, {RECORDS} records of {LENGTH} tokens: scoring")
    print(f"{scoring:.2f} s, moving the weights {moved:.3f} s, {moved / scoring:.1%} more")


def seconds(work: Callable[[], None]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began

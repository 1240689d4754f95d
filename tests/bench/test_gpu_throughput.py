"""Tokens per second on one GPU, compared with Transformers' Trainer on the same texts.

Trainer trains single documents in order of length, and packed rows: with attention across
documents, and by document. They take turns. Each gets enough texts for four of the megabatches
that Trainer sorts. Run with `pytest -m gpu tests/bench/test_gpu_throughput.py -s`.
"""

from __future__ import annotations

import os
import statistics
from functools import partial
from pathlib import Path

import pytest
import scipy
import torch
import transformers

from support.gpu_throughput import DOCUMENTS, LENGTH, VOCABULARY, measured, our_run, trainer_run
from support.throughput import functions

pytestmark = pytest.mark.gpu
ROUNDS = int(os.environ.get("STEADYTRAIN_BENCH_ROUNDS", "3"))
STEPS = 50
"""A megabatch of Trainer's: all lengths occur in the order that it has over an epoch."""
TEXTS = 4 * STEPS * DOCUMENTS
PEERS = ("group_by_length", "packed", "packed by document")


@pytest.mark.timeout(3600)
def test_tokens_a_second(tmp_path):
    folders = [Path(package.__file__).parent for package in (torch, transformers, scipy)]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    texts = functions(TEXTS, VOCABULARY, LENGTH, files)
    print(f"\n{len(texts)} functions, {statistics.mean(map(len, texts)):.0f} tokens on average")
    kinds = {"ours": our_run} | {kind: partial(trainer_run, kind) for kind in PEERS}
    found = {kind: [] for kind in kinds}
    for turn in range(ROUNDS):
        for kind, ready in kinds.items():
            run = measured(partial(ready, texts), tmp_path / f"{kind}-{turn}", STEPS)
            found[kind].append(run)
            print(f"{kind}: {run.speed:,.0f} tokens/s, {run.memory / 1e9:.1f} GB", flush=True)
    for kind in PEERS:
        ratios = [
            one.speed / other.speed for one, other in zip(found["ours"], found[kind], strict=True)
        ]
        print(f"ours is {statistics.median(ratios):.2f} times as fast as {kind}: {ratios}")
    # The packed peer without boundaries computes something else, and less.
    assert statistics.median(one.speed for one in found["ours"]) > statistics.median(
        one.speed for one in found["group_by_length"]
    )

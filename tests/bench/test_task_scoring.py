"""Four-choice questions, compared with lm-eval's own `hf` model at its best batch size.

Both answer the same questions with the same model, in turns, each in its own process. The results
are medians and ranges of CPU time, which depends less on other load on the machine. Run with
`pytest -m bench tests/bench/test_task_scoring.py -s`. Set the size with STEADYTRAIN_BENCH_ROUNDS
and STEADYTRAIN_BENCH_QUESTIONS.
"""

from __future__ import annotations

import os
import statistics

import numpy as np
import pytest

from support.choices import CHOICES, LENGTHS, Found, answer, write_case

pytestmark = pytest.mark.bench
ROUNDS = int(os.environ.get("STEADYTRAIN_BENCH_ROUNDS", "3"))
QUESTIONS = int(os.environ.get("STEADYTRAIN_BENCH_QUESTIONS", "100"))
BATCHES = (1, 4, 16, 64)
"""Candidate batch sizes for lm-eval; the comparison uses its fastest."""
TARGETS = {"fp32": 6.0, "bf16": 3.5}
MODEL = {
    "model_type": "llama",
    "vocab_size": 32_768,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    folder = tmp_path_factory.mktemp("case")
    write_case(folder, MODEL, QUESTIONS)
    return folder


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.timeout(7200)
def test_scoring_throughput(tmp_path, case, precision, length):
    half = precision == "bf16"

    def by(kind: str, turn: object, batch_size: int = 1) -> Found:
        out = tmp_path / f"{kind}-{turn}.json"
        return answer(kind, case / f"{length}.json", out, half=half, batch_size=batch_size)

    tried = {size: by("hf", f"batch-{size}", size).cpu_seconds for size in BATCHES}
    best = min(tried, key=lambda size: tried[size])
    print(f"\nchoices of {length}; lm-eval, CPU seconds by batch size: {tried}; {best} is taken")
    pairs = [(by("ours", turn), by("hf", turn, best)) for turn in range(ROUNDS)]
    ratios = [theirs.cpu_seconds / ours.cpu_seconds for ours, theirs in pairs]
    for kind, found in zip(("ours", "hf"), zip(*pairs, strict=True), strict=True):
        speeds = sorted(QUESTIONS / each.cpu_seconds for each in found)
        print(
            f"  {precision} {kind:5} {statistics.median(speeds):6.2f} questions a CPU second "
            f"({speeds[0]:.2f} to {speeds[-1]:.2f})"
        )
    print(
        f"  {statistics.median(ratios):.2f} x ({min(ratios):.2f} to {max(ratios):.2f}), "
        f"target {TARGETS[precision]} x"
    )
    ours, theirs = (np.reshape(each.nats, (-1, CHOICES)) for each in pairs[0])
    same = (ours.argmax(1) == theirs.argmax(1)).mean()
    print(f"  largest difference {abs(ours - theirs).max():.2g} nats, {same:.1%} same choices")
    if not half:
        assert same == 1
        # Sums over up to a hundred tokens in float32; lm-eval also accumulates in float32.
        assert abs(ours - theirs).max() < 1e-6 * abs(theirs).max()
    # The choices of a question share its context. The shorter they are compared with it, the larger
    # the gain.
    assert statistics.median(ratios) > (TARGETS[precision] if length == "one-line" else 3.5)

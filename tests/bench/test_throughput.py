"""Tokens a second of a small language model, beside Transformers' Trainer on the same texts.

Trainer in random order, and as it is fastest, in the order of lengths (`group_by_length`). One
after another in each round, each in a process of its own; medians. Run with
`pytest -m bench tests/bench/test_throughput.py -s`. STEADYTRAIN_BENCH_ROUNDS and
STEADYTRAIN_BENCH_STEPS give the size. bf16 shows its worth on a CPU with AMX alone. What each
takes of the CPU stands beside, since that depends less on who else uses the machine.
"""

from __future__ import annotations

import os
import statistics

import pytest

from support.throughput import DOCUMENTS, LENGTH, Found, functions, run

pytestmark = pytest.mark.bench
ROUNDS = int(os.environ.get("STEADYTRAIN_BENCH_ROUNDS", "3"))
STEPS = int(os.environ.get("STEADYTRAIN_BENCH_STEPS", "10"))
WORDS = 8192
KINDS = ("ours", "group_by_length", "random")


@pytest.fixture(scope="module")
def texts():
    found = functions((STEPS + 2) * DOCUMENTS, WORDS)
    lengths = list(map(len, found))
    mean = statistics.mean(lengths)
    print(f"\n{len(found)} functions, {mean:.0f} tokens on average, {max(lengths)} at most")
    return found


@pytest.mark.parametrize("half", [True, False], ids=["bf16", "fp32"])
@pytest.mark.parametrize("vocabulary", [32_768, WORDS], ids=["32k", "8k"])
@pytest.mark.timeout(7200)
def test_tokens_a_second(tmp_path, texts, vocabulary, half):
    model = {
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": LENGTH,
    }
    found: dict[str, list[Found]] = {kind: [] for kind in KINDS}
    for turn in range(ROUNDS):
        for kind in KINDS:
            found[kind].append(run(kind, tmp_path / f"{kind}-{turn}", model, texts, half=half))
    print(f"\n{vocabulary} words, {'bf16' if half else 'fp32'}, medians of {ROUNDS}:")
    for kind in KINDS:
        speed, cpu_speed, memory, loss = (
            statistics.median(getattr(each, name) for each in found[kind])
            for name in ("speed", "cpu_speed", "memory", "loss")
        )
        ratio = median_ratio(found[kind], found["ours"])
        print(
            f"  {kind:16} {speed:7.0f} tokens/s, {cpu_speed:7.0f} by CPU time, "
            f"ours {ratio:.2f} x, {memory / 1e6:6.0f} MB more at the peak, loss {loss:.3f}"
        )
    losses = [each[0].loss for each in found.values()]
    assert max(losses) - min(losses) < 0.05 * min(losses)
    assert median_ratio(found["group_by_length"], found["ours"]) > 1


def median_ratio(peer: list[Found], ours: list[Found]) -> float:
    """Of the CPU's time, round by round."""
    return statistics.median(
        one.cpu_speed / other.cpu_speed for one, other in zip(ours, peer, strict=True)
    )

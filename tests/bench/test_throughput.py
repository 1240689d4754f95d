"""Tokens per second of small models, compared with Transformers' Trainer and TRL on the same texts.

They run one after another in each round, each in its own processes; the results are medians and
ranges of the ratios within a round. Run with `pytest -m bench tests/bench/test_throughput.py -s`.
Set the size with STEADYTRAIN_BENCH_ROUNDS and STEADYTRAIN_BENCH_TEXTS. On a CPU, bf16 is only
faster with AMX or AVX512-BF16. Runs of one thread are compared by CPU time, which depends less on
other load on the machine; all others are compared by wall-clock time.

Trainer's group_by_length sorts megabatches of 50 micro-batches, or of a quarter of the texts if
they are fewer. So each run reads all of its texts once, and no fewer than four megabatches.
"""

from __future__ import annotations

import os
import statistics

import pytest

from support.class_throughput import run_classes
from support.throughput import DOCUMENTS, LENGTH, functions, run
from support.timed import median_ratio, table

pytestmark = pytest.mark.bench
ROUNDS = int(os.environ.get("STEADYTRAIN_BENCH_ROUNDS", "3"))
LEAST = 4000
"""Texts of which Trainer sorts four whole megabatches, of 800 texts each, and more."""
TEXTS = int(os.environ.get("STEADYTRAIN_BENCH_TEXTS", "6000"))
WORDS = 8192
# Trainer's best built-in order, its default order, and TRL's packing.
PEERS = ("group_by_length", "random", "trl")


@pytest.fixture(scope="module")
def texts():
    found = functions(TEXTS + 2 * DOCUMENTS, WORDS)
    assert len(found) >= LEAST
    lengths = list(map(len, found))
    mean = statistics.mean(lengths)
    print(f"\n{len(found)} functions, {mean:.0f} tokens on average, {max(lengths)} at most")
    return found


def _model(vocabulary):
    return {
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": LENGTH,
    }


@pytest.mark.parametrize("half", [True, False], ids=["bf16", "fp32"])
@pytest.mark.parametrize("vocabulary", [32_768, WORDS], ids=["32k", "8k"])
@pytest.mark.parametrize("threads", [1, 2], ids=["one-thread", "two-threads"])
@pytest.mark.timeout(36_000)
def test_tokens_a_second(tmp_path, texts, vocabulary, half, threads):
    model, by = _model(vocabulary), "cpu_speed" if threads == 1 else "speed"
    found = {kind: [] for kind in ("ours", *PEERS)}
    for turn in range(ROUNDS):
        for kind, each in found.items():
            folder = tmp_path / f"{kind}-{turn}"
            each.append(run(kind, folder, model, texts, half=half, threads=threads))
    waits = max(one.data_wait for one in found["ours"])
    print(f"\n{vocabulary} words, {'bf16' if half else 'fp32'}, medians of {ROUNDS}, {by}:")
    print(table(found, by))
    print(f"  ours waited for data in {waits:.2%} of the time at most")
    # Excludes TRL, which packs, truncates and weights texts differently.
    losses = [found[kind][0].loss for kind in ("ours", "group_by_length", "random")]
    assert max(losses) - min(losses) < 0.05 * min(losses)
    assert all(median_ratio(found["ours"], found[peer], by) > 1 for peer in PEERS)


@pytest.mark.timeout(36_000)
def test_two_ranks(tmp_path, texts):
    """Each rank accumulates four micro-batches per update."""
    found = {kind: [] for kind in ("ours", "group_by_length", "ours, one rank")}
    for turn in range(ROUNDS):
        for kind, each in found.items():
            name, _, alone = kind.partition(", ")
            folder = tmp_path / f"{name}-{turn}{alone[:3]}"
            # One rank alone processes as many micro-batches per update as two ranks together.
            ranks, accumulate = (1, 8) if alone else (2, 4)
            each.append(
                run(
                    name,
                    folder,
                    _model(32_768),
                    texts,
                    half=True,
                    ranks=ranks,
                    accumulate=accumulate,
                )
            )
    efficiency, cpu_efficiency = (
        median_ratio(found["ours"], found["ours, one rank"], by) / 2
        for by in ("speed", "cpu_speed")
    )
    waits = statistics.median(one.communication_wait for one in found["ours"])
    print(f"\ntwo ranks of one thread, medians of {ROUNDS}, by the clock:")
    print(table(found, "speed"))
    print(f"  two ranks are {efficiency:.0%} as efficient as one, {cpu_efficiency:.0%} by CPU time")
    print(f"  they waited for each other in {waits:.1%} of the time")
    assert median_ratio(found["ours"], found["group_by_length"], "speed") > 1
    assert efficiency > 0.5


@pytest.mark.timeout(36_000)
def test_classification(tmp_path, texts):
    model = {
        "model_type": "bert",
        "vocab_size": WORDS,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "max_position_embeddings": LENGTH,
    }
    found = {kind: [] for kind in ("ours", "group_by_length", "random")}
    for turn in range(ROUNDS):
        for kind, each in found.items():
            each.append(run_classes(kind, tmp_path / f"{kind}-{turn}", model, texts))
    print(f"\nclassification, unequal lengths, bf16, medians of {ROUNDS}, by CPU time:")
    print(table(found))
    assert median_ratio(found["ours"], found["random"]) > 1

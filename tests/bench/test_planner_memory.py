"""How far the formula of memory is from live tensors, over configurations drawn by lot.

Run with `pytest -m bench tests/bench/test_planner_memory.py -s`. STEADYTRAIN_BENCH_ROUNDS draws so
many of each family (8), STEADYTRAIN_BENCH_SEED others.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from typing import Any

import pytest

from steadytrain.components.shared.config import AdapterConfig
from steadytrain.components.train.plan.memory import peak_memory
from steadytrain.components.train.plan.setting import Setting
from steadytrain.components.train.plan.shape import FAMILIES, shape_of

from support.memory_truth import Case, measured_peak

pytestmark = pytest.mark.bench
ROUNDS = int(os.environ.get("STEADYTRAIN_BENCH_ROUNDS", "8"))
SEED = int(os.environ.get("STEADYTRAIN_BENCH_SEED", "1"))


def model(family: str, lot: random.Random) -> Mapping[str, Any]:
    heads, width = lot.choice([4, 8, 12]), lot.choice([16, 32])
    hidden, layers = heads * width, lot.choice([3, 6, 10])
    vocabulary = lot.choice([1000, 4000, 16_000])
    if family == "gpt2":
        dropouts = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), lot.choice([0, 0.1]))
        sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": 1024}
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        return {"model_type": family, "vocab_size": vocabulary, **sizes, **dropouts, **ends}
    fields = {
        "model_type": family,
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": int(hidden * lot.choice([2, 2.7, 4])),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": 1024,
    }
    if family == "bert":
        return fields
    shared = {"num_key_value_heads": heads // lot.choice([1, 2, 4])}
    return {**fields, **shared, "tie_word_embeddings": lot.random() < 0.5}


def case(family: str, lot: random.Random) -> Case:
    classes = family == "bert" or lot.random() < 0.2
    adapter = lot.random() < 0.25 and family != "bert"
    return Case(
        model(family, lot),
        Setting(
            length=lot.choice([64, 160, 384]),
            micro_batch=lot.choice([1, 2, 5]),
            precision=lot.choice(["fp32", "bf16"]),
            recompute=lot.random() < 0.5,
            masked=lot.random() < 0.6,
            accumulates=lot.random() < 0.4,
            adapter=AdapterConfig(kind="lora", rank=8) if adapter else AdapterConfig(),
            cuda=False,
        ),
        classes=classes,
    )


def test_the_formula_against_live_tensors():
    lot, everything = random.Random(SEED), list[float]()
    for family in FAMILIES:
        errors = []
        for drawn in (case(family, lot) for _ in range(ROUNDS)):
            shape = shape_of(drawn.model, labels=drawn.labels)
            error = peak_memory(shape, drawn.setting).total / measured_peak(drawn) - 1
            errors.append(error)
            print(f"{error:+6.1%} {family} {drawn.model} {drawn.setting}")
        sizes = [abs(error) for error in errors]
        print(f"{family}: mean {sum(sizes) / len(sizes):.1%}, worst {max(sizes):.1%}")
        everything += sizes
    print(f"all: mean {sum(everything) / len(everything):.1%}, worst {max(everything):.1%}")
    assert sum(everything) / len(everything) <= 0.05
    assert max(everything) <= 0.12

"""Compare the memory formula and the dry run with live tensors, on randomly sampled configs.

The benchmark also shows what accelerate's `estimate-memory` estimates for the same models, using
its own functions. That command knows the size of the model. About training, it knows only that it
uses AdamW and whether it runs in 16 bits.

Run with `pytest -m bench tests/bench/test_planner_memory.py -s`. STEADYTRAIN_BENCH_ROUNDS sets the
number of samples per family (8), STEADYTRAIN_BENCH_SEED changes the sample.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
from accelerate import init_empty_weights
from accelerate.commands.estimate import estimate_training_usage
from accelerate.utils import calculate_maximum_sizes

from steadytrain.components.memory.random_model import random_model
from steadytrain.components.memory.setting import Setting
from steadytrain.components.memory.shape import FAMILIES
from steadytrain.components.shared.config import AdapterConfig

from support.memory_truth import Case, by_dry_run, by_formula, measured_peak

pytestmark = pytest.mark.bench
ROUNDS = int(os.environ.get("STEADYTRAIN_BENCH_ROUNDS", "8"))
SEED = int(os.environ.get("STEADYTRAIN_BENCH_SEED", "1"))
ENCODERS = ("bert", "roberta", "distilbert", "modernbert")
"""Families that train with a classification head only."""


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
        # A multiple of 8, which the expert kernels require.
        "intermediate_size": int(hidden * lot.choice([2, 2.7, 4])) // 8 * 8,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": 1024,
    }
    if family in ENCODERS:
        # DistilBERT's name for it.
        return {**fields, "hidden_dim": fields["intermediate_size"]}
    shared = {"num_key_value_heads": heads // lot.choice([1, 2, 4])}
    return {**fields, **shared, "tie_word_embeddings": lot.random() < 0.5}


def case(family: str, lot: random.Random) -> Case:
    classes = family in ENCODERS or lot.random() < 0.2
    adapter = lot.random() < 0.25 and family not in ENCODERS
    return Case(
        model(family, lot),
        Setting(
            length=lot.choice([64, 160, 384]),
            micro_batch=lot.choice([1, 2, 5]),
            precision=lot.choice(["fp32", "bf16"]),
            recompute=lot.random() < 0.5,
            # A plan expects padding in the rows of a classifier.
            masked=(lot.random() < 0.6) | classes,
            accumulates=lot.random() < 0.4,
            adapter=AdapterConfig(kind="lora", rank=8) if adapter else AdapterConfig(),
            cuda=False,
        ),
        classes=classes,
    )


def estimated_by_accelerate(drawn: Case) -> int:
    """Return the total that accelerate's command computes.

    The command itself needs the model on a hub and doesn't know about adapters.
    """
    whole = replace(drawn.setting, adapter=AdapterConfig())
    with init_empty_weights():
        size, _ = calculate_maximum_sizes(random_model(drawn.model, whole, drawn.labels))
    precision = "float16" if drawn.setting.half else "float32"
    return max(estimate_training_usage(size, precision).values())


def told(name: str, errors: Iterable[float]) -> tuple[float, float]:
    """Print and return the mean and the worst of some errors."""
    sizes = [abs(error) for error in errors]
    mean, worst = sum(sizes) / len(sizes), max(sizes)
    print(f"{name}: mean {mean:.2%}, worst {worst:.2%}")
    return mean, worst


@dataclass(frozen=True)
class Errors:
    """The relative errors for one configuration: (estimate / measured peak) - 1."""

    formula: float
    dry: float
    accelerate: float
    adapted: bool


def errors_of(drawn: Case) -> Errors:
    truth = measured_peak(drawn)
    return Errors(
        by_formula(drawn) / truth - 1,
        by_dry_run(drawn) / truth - 1,
        estimated_by_accelerate(drawn) / truth - 1,
        drawn.setting.adapter.freezes,
    )


def test_formula_and_dry_run_against_live_tensors():
    lot, found = random.Random(SEED), list[Errors]()
    for family in FAMILIES:
        for drawn in (case(family, lot) for _ in range(ROUNDS)):
            errors = errors_of(drawn)
            print(
                f"{errors.formula:+6.1%} {errors.dry:+6.1%} {errors.accelerate:+7.1%} {family} "
                f"{drawn.model} {drawn.setting}"
            )
            found.append(errors)
    told("accelerate's estimate-memory", (each.accelerate for each in found))
    whole = (each.accelerate for each in found if not each.adapted)
    told("accelerate's estimate-memory, without adapters", whole)
    mean, worst = told("the formula", (each.formula for each in found))
    assert (mean <= 0.05, worst <= 0.15) == (True, True)
    mean, worst = told("the dry run", (each.dry for each in found))
    assert (mean <= 0.015, worst <= 0.04) == (True, True)

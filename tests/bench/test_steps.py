"""What techniques cost in a step: CPU time and live memory, against a step without them.

Each step is the training loop's own, with clipping and the update. The plan's formula is next to
it. Run with `pytest -m bench tests/bench/test_steps.py -s`. STEADYTRAIN_BENCH_ROUNDS sets how often
the steps take turns.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from support.costed_runs import BERT, LARGER, LLAMA, ROWS, CostedRun
from support.costs import in_turns, peak_beside
from support.scoring import fresh

pytestmark = [pytest.mark.bench, pytest.mark.timeout(3600)]
ROUNDS = int(os.environ.get("STEADYTRAIN_BENCH_ROUNDS", "9"))
CLASSIFIER, LANGUAGE = "sequence_classification", "causal_lm"
NO_DROPOUT = {"hidden": 0, "attention": 0}
LOWER_HALF = [{"match": r"embeddings\.|layer\.[01]\.", "frozen": True}]


@dataclass(frozen=True)
class Step:
    """A step to measure. `dropout` is `model.dropout`."""

    task: str = CLASSIFIER
    model: Mapping[str, Any] = field(default_factory=lambda: BERT)
    training: Mapping[str, Any] = field(default_factory=dict)
    dropout: Mapping[str, float] = field(default_factory=dict)
    rows: int = ROWS


def language(**training: Any) -> Step:
    return Step(LANGUAGE, LLAMA, training)


GROUPS: dict[str, dict[str, Step]] = {
    "classifier": {
        "plain": Step(),
        "label smoothing": Step(training={"label_smoothing_factor": 0.1}),
        "class weights": Step(
            training={"class_weights": {"kind": "given", "given": {"a": 3.0, "b": 1.0, "c": 0.5}}}
        ),
        "focal loss": Step(training={"focal_loss": {"gamma": 2.0}}),
        "contrastive loss of texts": Step(
            training={"batch_contrastive": {"rows": ROWS, "weight": 0.5}}
        ),
        "several data sets": Step("multi_task"),
        "learned loss weights": Step(
            "multi_task", training={"multi_task": {"loss_weighting": "uncertainty"}}
        ),
    },
    "dropout": {
        "none": Step(dropout=NO_DROPOUT),
        "hidden": Step(dropout={**NO_DROPOUT, "hidden": 0.1}),
        "attention": Step(dropout={**NO_DROPOUT, "attention": 0.1}),
        "classifier": Step(dropout={**NO_DROPOUT, "classifier": 0.1}),
    },
    "parameter groups": {
        "plain": Step(),
        "layer decay": Step(training={"layer_decay": 0.9}),
        "frozen embeddings": Step(
            training={"param_groups": [{"match": r"embeddings\.", "frozen": True}]}
        ),
        "frozen lower half": Step(training={"param_groups": LOWER_HALF}),
    },
    "optimizers": {
        "adamw_torch": Step(LANGUAGE, LARGER, {"bf16": True}),
        "muon": Step(LANGUAGE, LARGER, {"bf16": True, "optim": "muon"}),
    },
    "language model": {
        "plain": language(),
        "label smoothing": language(label_smoothing_factor=0.1),
        "hidden spans": Step("denoising", LLAMA),
    },
    "encoder": {
        "classifier": Step(),
        "masked tokens": Step("masked_lm"),
        "text embedding": Step(
            "text_embedding",
            training={"batch_contrastive": {"rows": ROWS // 2}},
            rows=ROWS // 2,
        ),
    },
}


@pytest.mark.parametrize("group", GROUPS)
def test_cost_of_a_step(tmp_path, group):
    torch.set_num_threads(1)
    fresh()
    runs = {
        name: CostedRun.make(
            tmp_path / name,
            step.task,
            step.model,
            rows=step.rows,
            dropout=step.dropout,
            **step.training,
        )
        for name, step in GROUPS[group].items()
    }
    timed = in_turns({name: run.step for name, run in runs.items()}, ROUNDS)
    usual = next(iter(runs.values())).planned
    print(f"\n{group}: {next(iter(timed.values())).median * 1e3:.0f} ms for the first one")
    for name, run in runs.items():
        expected = run.planned
        print(
            f"  {name:26} {timed[name]} of CPU time, x {expected.work / usual.work:.2f} by the "
            f"formula; {peak_beside(run.held(), run.step) / 1e6:.1f} MB at the peak, "
            f"{expected.passing / 1e6:.1f} by the formula; "
            f"{expected.memory.optimizer / 1e6:.1f} MB of optimizer state"
        )

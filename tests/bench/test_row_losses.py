"""What a curriculum by loss costs: scoring all rows, compared with training on them once.

Run with `pytest -m bench tests/bench/test_row_losses.py -s`. STEADYTRAIN_BENCH_ROUNDS sets how
often both take turns.
"""

from __future__ import annotations

import os
import shutil

import pytest
import torch

from steadytrain.components.memory.techniques import grader_of
from steadytrain.components.shared.chunks import SCORED_TOKENS
from steadytrain.components.train.loop.control import Watch
from steadytrain.components.train.loop.data import Rows
from steadytrain.components.train.loop.row_losses import row_losses

from support.costed_runs import BERT, LENGTH, LLAMA, CostedRun
from support.costs import in_turns, peak_beside
from support.scoring import fresh

pytestmark = [pytest.mark.bench, pytest.mark.timeout(3600)]
ROUNDS = int(os.environ.get("STEADYTRAIN_BENCH_ROUNDS", "5"))
BATCHES = 16


@pytest.mark.parametrize(
    ("task", "architecture"),
    [("sequence_classification", BERT), ("causal_lm", LLAMA)],
    ids=["classifier", "language model"],
)
def test_cost_of_scoring(tmp_path, task, architecture):
    torch.set_num_threads(1)
    fresh()
    plain = CostedRun.make(tmp_path / "plain", task, architecture, batches=BATCHES)
    reference = tmp_path / "reference"
    plain.parts.packager.export(plain.parts.module, reference)
    curriculum = {"by": "loss", "model": str(reference)}
    run = CostedRun.make(
        tmp_path / "run", task, architecture, batches=BATCHES, curriculum=curriculum
    )
    parts = run.parts
    rows: Rows = parts.train

    def score() -> None:
        shutil.rmtree(run.bench.workspace.losses, ignore_errors=True)
        row_losses(parts.config, run.bench.data, rows, parts.accelerator, Watch())

    def train() -> None:
        for _ in range(BATCHES):
            plain.step()

    timed = in_turns({"training": train, "scoring": score}, ROUNDS)
    found = grader_of(parts.config, half=False, length=LENGTH)
    assert found is not None
    expected = found.flops * len(rows) * LENGTH / (plain.planned.work * BATCHES)
    peak = peak_beside([], score)
    print(
        f"\n{task}, {len(rows)} rows of {LENGTH} tokens: {timed['scoring']} of the CPU time of "
        f"training on them, x {expected:.2f} by the formula; {peak / 1e6:.0f} MB at the peak, "
        f"{found.alone(SCORED_TOKENS) / 1e6:.0f} by the formula"
    )

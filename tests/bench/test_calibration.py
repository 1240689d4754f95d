"""Compare the step time from `plan --calibrate` with a run of the same config, on a CPU.

The two take turns, so other load on the machine affects both. Run with
`pytest -m bench tests/bench/test_calibration.py -s`.
"""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from steadytrain.components.plan.calibration import Trial, row_lengths
from steadytrain.components.plan.plan import plan_training
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.sizing.hardware import all_gpus, this_cpu
from steadytrain.components.sizing.time_cost import Span, Speed
from steadytrain.components.train.loop.batches import take_share
from steadytrain.components.train.loop.control import OUTCOMES
from steadytrain.components.train.loop.setup import set_up
from steadytrain.components.train.loop.steps import agree, take_step

from support.training import LLAMA, VOCABULARY, packed_row, write_data

pytestmark = pytest.mark.bench
WARM_UP, ROUNDS = 1, 12
MODEL = {
    **LLAMA,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "max_position_embeddings": 256,
    "vocab_size": VOCABULARY,
}
CONFIG = {
    "name": "calibrated",
    "output": "nothing-is-written",
    "data": {"source": ["none"], "task": "causal_lm", "sequence_length": 256},
    "model": {"config": MODEL},
    "training": {"global_batch_size": 16, "max_steps": 100},
    "compute": {"device": "cpu"},
}


def test_calibrated_step_time_matches_a_run(tmp_path):
    config = from_mapping(CONFIG)
    lot = np.random.default_rng(0)
    rows = [packed_row([100, 156], lot) for _ in range(100)]
    data = write_data(tmp_path, rows, rows[:8], sequence_length=256)
    untimed = Speed(Span(1, 1), "nothing yet")
    plan = plan_training(config, all_gpus(), this_cpu(config), timed=lambda *_: untimed)
    batch = plan.choice.batch
    parts = set_up(config, data, batch.settings)
    trial = Trial(plan.job, plan.choice.setting, config, print)
    lengths = row_lengths(config, batch.micro_batch_size)
    ours, runs = list[float](), list[float]()
    for step in range(WARM_UP + ROUNDS):
        began = time.perf_counter()
        own = take_share(parts, step)
        agreed = agree(parts, own, [0] * len(OUTCOMES))
        take_step(
            parts, step, own.batches, agreed.weight, limit=math.inf, before_update=lambda _: None
        )
        runs.append(time.perf_counter() - began)
        _, micro, update = trial.step(lengths)
        ours.append(batch.gradient_accumulation_steps * micro + update)
    ratio = sum(ours[WARM_UP:]) / sum(runs[WARM_UP:])
    print(
        f"a step of {batch}: calibrated {min(ours):.2f} to {max(ours[WARM_UP:]):.2f} s, of a run "
        f"{min(runs):.2f} to {max(runs[WARM_UP:]):.2f} s; on average {ratio:.2f} times as long"
    )
    assert 0.8 < ratio < 1.25

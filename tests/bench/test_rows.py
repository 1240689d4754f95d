"""What techniques cost the thread that reads ahead: CPU time of each row, by order and by draw.

The peer is reading the same row in the ordinary order. Run with
`pytest -m bench tests/bench/test_rows.py -s`. STEADYTRAIN_BENCH_ROUNDS sets how often they take
turns.
"""

from __future__ import annotations

import os
from functools import partial

import numpy as np
import pytest

from steadytrain.components.tasks.base import OpenTask
from steadytrain.components.techniques.curriculum import CurriculumConfig
from steadytrain.components.techniques.curriculum.order import Curriculum
from steadytrain.components.techniques.multi_task import MultiTaskConfig
from steadytrain.components.techniques.multi_task.weights import mixture_of
from steadytrain.components.techniques.order import Order, RowOrder
from steadytrain.components.techniques.rare_classes.balanced_order import BalancedOrder
from steadytrain.components.train.loop.data import Rows, drawn

from support.costed_runs import BERT, LENGTH, LLAMA, PARTS, bench_of
from support.costs import in_turns

pytestmark = pytest.mark.bench
ROUNDS = int(os.environ.get("STEADYTRAIN_BENCH_ROUNDS", "5"))
COUNT, BATCH, DRAWN = 200_000, 32, 256


def test_cost_of_an_order():
    """Creating the order of 200,000 rows, and taking all of them."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(8, 512, size=COUNT).astype(np.int32)
    labels = generator.choice(4, size=COUNT, p=[0.7, 0.2, 0.09, 0.01]).astype(np.int32)
    plain = RowOrder(COUNT, 0, lengths, BATCH)
    made = {
        "ordinary": partial(RowOrder, COUNT, 0, lengths, BATCH),
        "balanced": partial(BalancedOrder, COUNT, 0, lengths, BATCH, values=labels),
        "several data sets, temperature": partial(
            mixture_of, labels, PARTS, MultiTaskConfig(sampling="temperature", temperature=2), 0
        ),
        "curriculum by length": partial(
            Curriculum,
            plain,
            lengths.astype(np.float64),
            CurriculumConfig(by="length"),
            seed=0,
            batch=BATCH,
            steps=COUNT // BATCH,
        ),
    }

    def take_all(make) -> None:
        order: Order = make()
        for start in range(0, COUNT - BATCH + 1, BATCH):
            order.take(start, BATCH)

    creating = in_turns(made, ROUNDS)
    taking = in_turns({name: partial(take_all, make) for name, make in made.items()}, ROUNDS)
    for name, each in taking.items():
        print(
            f"\n{name}: {each.median / COUNT * 1e6:.2f} microseconds of CPU time per row, "
            f"{creating[name].median:.3f} s of it before the first step",
            end="",
        )
    print()


@pytest.mark.parametrize(
    ("task", "architecture"), [("masked_lm", BERT), ("denoising", LLAMA)], ids=lambda item: ""
)
def test_cost_of_a_draw(tmp_path, task, architecture):
    """What hiding tokens takes for a row of 128 tokens, and reading and collating it."""
    bench = bench_of(tmp_path, task, {"config": dict(architecture)}, rows=DRAWN // 4)
    training = OpenTask(bench.config, bench.data).training
    rows = Rows([bench.data.path(name) for name in bench.data.sides["train"].shards])
    read = [rows[index] for index in range(DRAWN)]
    hidden = [drawn(training, row, place, training=True) for place, row in enumerate(read)]
    timed = in_turns(
        {
            "reading": lambda: [rows[index] for index in range(DRAWN)],
            "hiding": lambda: [
                drawn(training, row, place, training=True) for place, row in enumerate(read)
            ],
            "collating": lambda: [
                training.collate(hidden[start : start + 8]) for start in range(0, DRAWN, 8)
            ],
        },
        ROUNDS,
    )
    each = ", ".join(f"{name} {work.median / DRAWN * 1e6:.0f}" for name, work in timed.items())
    print(f"\n{task}, microseconds of CPU time per row of {LENGTH} tokens: {each}")

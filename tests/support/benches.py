"""Fixtures for tests that train in this process."""

from __future__ import annotations

import pytest
import torch

from support.training import Bench, language_rows, write_data


@pytest.fixture(autouse=True)
def one_thread():
    """Use one thread, like ranks started with OMP_NUM_THREADS=1, so that sums match bit for bit."""
    torch.set_num_threads(1)


@pytest.fixture
def make_bench(tmp_path):
    """Return a function that makes a run on tiny language data, with optional config sections."""

    def make(name="run", *, rows=40, held_out=9, task="causal_lm", **sections):
        data = write_data(
            tmp_path / "data", language_rows(rows), language_rows(held_out, seed=1), task=task
        )
        training = {
            "global_batch_size": 4,
            "micro_batch_size": 2,
            "max_steps": 6,
            "learning_rate": 5e-3,
            "logging_steps": 1,
            "eval_steps": 3,
            "save_steps": 3,
        }
        training |= sections.pop("training", {})
        return Bench.make(tmp_path / name, data, training=training, **sections)

    return make

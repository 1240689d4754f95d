"""What an exported model costs its users is measured, and known values are found again."""

from __future__ import annotations

import time

import numpy as np
import pytest

from steadytrain.components.shared import artifact
from steadytrain.components.shared.artifact import timed

WEIGHTS, SCRATCH = 6_000_000, 3_000_000
"""Numbers of 8 bytes: what a model keeps, and what an answer takes on top."""


@pytest.fixture
def folder(tmp_path):
    np.save(tmp_path / "weights.npy", np.ones(WEIGHTS))
    return tmp_path


def opened(folder):
    weights = np.load(folder / "weights.npy")

    def answer(seconds):
        time.sleep(seconds)
        return weights[:SCRATCH] + 1

    return answer


def test_memory_is_what_loading_and_answering_take_at_the_peak(folder):
    before = [np.ones(20_000_000)]
    assert artifact.peak_memory() > before[0].nbytes
    before.clear()
    found = timed(folder, lambda: opened(folder), [0.001, 0.001, 2.0])
    expected = 8 * (WEIGHTS + SCRATCH) / 1e6
    assert found.memory_mb == pytest.approx(expected, rel=0.15)
    assert found.size_mb == pytest.approx(8 * WEIGHTS / 1e6, rel=0.01)
    assert found.latency_p99_ms > 1900 > found.latency_p50_ms


def test_memory_is_unknown_where_the_system_does_not_say_it(folder, monkeypatch):
    monkeypatch.setattr(artifact, "_RESET", folder / "absent" / "clear_refs")
    assert timed(folder, lambda: opened(folder), [0.0]).memory_mb is None

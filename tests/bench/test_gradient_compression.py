"""What compressing gradients saves and costs: bytes and CPU time of a step on two gloo ranks.

The peer is plain DDP. Run with `pytest -m bench tests/bench/test_gradient_compression.py -s`.
STEADYTRAIN_BENCH_ROUNDS sets how often the steps take turns.
"""

from __future__ import annotations

import os

import pytest

from support.compressed import RANKS, measure
from support.forked import on_ranks

pytestmark = [pytest.mark.bench, pytest.mark.timeout(3600)]
ROUNDS = int(os.environ.get("STEADYTRAIN_BENCH_ROUNDS", "9"))


def test_cost_of_compression(tmp_path):
    found = tmp_path / "found.txt"
    on_ranks(RANKS, measure, tmp_path, found, ROUNDS)
    print(found.read_text())

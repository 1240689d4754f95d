"""The ranks of a node, as the agent follows them."""

from __future__ import annotations

import pytest

from steadytrain.components.train.agent import ranks as ranks_module
from steadytrain.components.train.agent.ranks import OUTLIVE_SECONDS, Ranks


class Process:
    """A rank that ends when a test says so."""

    def __init__(self):
        self.status = None

    def poll(self):
        return self.status


@pytest.fixture
def clock(monkeypatch):
    """Return the time in a list, which a test changes."""
    now = [0.0]
    monkeypatch.setattr(ranks_module.time, "monotonic", lambda: now[0])
    return now


def test_rank_that_takes_longer_than_another_one_to_end_is_not_killed(tmp_path, clock, monkeypatch):
    processes = {0: Process(), 1: Process()}
    ranks = Ranks(processes, tmp_path)
    monkeypatch.setattr(ranks, "kill", lambda: pytest.fail("it was killed"))
    processes[1].status = 0
    assert not ranks.all_exited()
    clock[0] = 2 * OUTLIVE_SECONDS
    assert not ranks.all_exited()
    processes[0].status = 0
    assert ranks.all_exited()
    assert ranks.exits() == {0: 0, 1: 0}

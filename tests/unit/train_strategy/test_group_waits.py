"""Every process group waits longer than it takes to find a hang."""

from __future__ import annotations

import json

import pytest

from steadytrain.components.shared.config import RecoveryConfig
from steadytrain.components.train.attempt import longest_wait

from support.forked import on_ranks
from support.group_waits import RANKS, late_gather, waits


@pytest.mark.long
def test_all_groups_of_all_strategies_wait_longer_than_a_hang_takes(tmp_path):
    """DeepSpeed and FSDP create groups of their own."""
    found = waits(tmp_path, ("ddp", "fsdp", "zero2"))
    assert len(found) > 2, found
    assert set(found.values()) == {longest_wait(RecoveryConfig())}


@pytest.mark.slow
def test_rank_that_waits_for_others_objects_shows_signs_of_life(tmp_path):
    on_ranks(RANKS, late_gather, tmp_path)
    found = json.loads((tmp_path / "gathered.json").read_text())
    assert found == [{"rank": 0}, {"rank": 1}]


def test_wait_follows_the_settings():
    settings = RecoveryConfig(start_timeout_seconds=7200, hang_timeout_seconds=60)
    assert longest_wait(settings) > 7200
    settings = RecoveryConfig(start_timeout_seconds=60, hang_timeout_seconds=9000)
    assert longest_wait(settings) > 9000

"""A long export is not a hang. A stalled one is."""

from __future__ import annotations

import threading
import time

import pytest

from steadytrain.components.train.loop import process
from steadytrain.components.train.loop.process import beating, wait_for_file


def test_only_progress_renews_the_heartbeat(monkeypatch):
    monkeypatch.setattr(process, "EVERY_SECONDS", 0.05)
    beats = []
    with beating(lambda: beats.append(1)):
        end = time.monotonic() + 300
        while len(beats) < 5 and time.monotonic() < end:
            sum(range(10_000))
        assert len(beats) >= 5
        # Like a write that never returns. Waking up is work, too, and there may be a beat for it.
        while time.monotonic() < end:
            seen = len(beats)
            time.sleep(1)
            if len(beats) == seen:
                break
        else:
            pytest.fail(f"{len(beats)} beats for a thread that only sleeps")
    assert "beating" not in [thread.name for thread in threading.enumerate()]


def test_waiting_ends_with_the_export(monkeypatch):
    monkeypatch.setattr(process, "EVERY_SECONDS", 0.05)
    try:
        with beating(lambda: None):
            raise OSError
    except OSError:
        pass
    assert "beating" not in [thread.name for thread in threading.enumerate()]


def test_rank_that_waits_for_rank_0_keeps_beating(tmp_path):
    beats, told = [], tmp_path / "result.json"

    def beat():
        beats.append(1)
        if len(beats) == 3:
            told.touch()

    wait_for_file(told, beat)
    assert len(beats) == 3

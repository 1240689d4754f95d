"""Heartbeats: rare, cheap, and timed by the observer's own clock."""

from __future__ import annotations

import os

import pytest

from steadytrain.components.train.heartbeat import STARTING, Beat, Heartbeat, Pulse


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_beat_contains_rank_step_and_phase(tmp_path, clock):
    heartbeat = Heartbeat(tmp_path / "beat", clock)
    assert Beat.read(tmp_path / "beat") == Beat(os.getpid(), 1, 0, STARTING)
    heartbeat.beat("train", 7)
    heartbeat.beat("validate")
    assert Beat.read(tmp_path / "beat") == Beat(os.getpid(), 3, 7, "validate")


def test_at_most_once_a_second_unless_the_phase_changes(tmp_path, clock):
    heartbeat = Heartbeat(tmp_path / "beat", clock)
    for step in range(1, 100):
        clock.now += 0.1
        heartbeat.beat("train", step)
    assert heartbeat.count == 1 + 1 + 9


def test_missing_file_is_not_a_beat(tmp_path):
    assert Beat.read(tmp_path / "beat") is None
    (tmp_path / "beat").write_text("")
    assert Beat.read(tmp_path / "beat") is None


def test_silence_ends_with_any_change(clock):
    pulse = Pulse(clock)
    clock.now = 5.0
    assert pulse.silence(None) == 5.0
    assert pulse.silence("a") == 0.0
    clock.now = 9.0
    assert pulse.silence("a") == 4.0
    assert pulse.silence("b") == 0.0


def test_suspended_observer_checks_again_before_judging(clock):
    pulse = Pulse(clock)
    pulse.silence(1)
    clock.now = 1000.0
    assert pulse.silence(2) == 0.0

"""Heartbeats: rare, cheap, and timed by the observer's own clock."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from steadytrain.components.shared.config import RecoveryConfig
from steadytrain.components.shared.periodic import Pulse
from steadytrain.components.train.agent import hang
from steadytrain.components.train.agent.hang import HangWatch
from steadytrain.components.train.agent.ranks import NodeShare
from steadytrain.components.train.attempt import STARTING, AttemptFolder, Beat, Heartbeat

FILES = Path("/proc/self/fd")


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


def test_beats_that_cannot_be_written_are_reported_once_and_end_nothing(tmp_path, clock, caplog):
    path = tmp_path / "beat"
    path.symlink_to("/dev/full")
    heartbeat = Heartbeat(path, clock)
    for step in range(1, 9):
        clock.now += 1.0
        heartbeat.beat("train", step)
    assert heartbeat.refusal == "No space left on device"
    path.unlink()  # as after a remount: the old descriptor no longer leads here
    clock.now += 1.0
    heartbeat.beat("train", 9)
    assert Beat.read(path) == Beat(os.getpid(), 10, 9, "train")
    assert heartbeat.refusal == ""
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2, told
    assert "cannot be written: No space left on device" in told[0]
    assert "written again" in told[1]


def test_stale_handle_is_opened_again(tmp_path, clock):
    path = tmp_path / "beat"
    heartbeat = Heartbeat(path, clock)
    (opened,) = (
        int(item.name) for item in FILES.iterdir() if item.exists() and item.samefile(path)
    )
    # A closed descriptor's number could go to a file of another thread.
    with Path(os.devnull).open("rb") as unwritable:
        os.dup2(unwritable.fileno(), opened)
    for step in (1, 2):
        clock.now += 1.0
        heartbeat.beat("train", step)
    assert Beat.read(path).step == 2


def test_missing_folder_ends_nothing(tmp_path, clock):
    heartbeat = Heartbeat(tmp_path / "missing" / "beat", clock)
    assert heartbeat.refusal == "No such file or directory"


def test_unreadable_beat_is_no_silence(tmp_path, clock):
    (tmp_path / "beat").symlink_to("beat")
    with pytest.raises(OSError, match="symbolic links"):
        Beat.read(tmp_path / "beat")
    pulse = Pulse(clock)
    pulse.silence("a")
    clock.now = 5.0
    pulse.excuse()
    clock.now = 6.0
    assert pulse.silence("a") == 1.0


@pytest.mark.parametrize(
    "put",
    [Path.mkdir, os.mkfifo, lambda path: path.write_bytes(b"one two \xff four")],
    ids=["folder", "pipe", "garbage"],
)
def test_something_else_in_the_place_of_a_beat_is_none_and_blocks_nobody(tmp_path, clock, put):
    put(tmp_path / "beat")
    assert Beat.read(tmp_path / "beat") is None
    assert Heartbeat(tmp_path / "beat", clock).count == 1


@pytest.mark.parametrize(
    ("phases", "nodes", "hangs"),
    [
        (("meet", "meet"), 1, True),
        # The other one still writes its part.
        (("meet", "save"), 1, False),
        # A rank of another node may still come.
        (("meet", "meet"), 2, False),
    ],
)
def test_ranks_that_all_wait_for_each_other_hang(
    tmp_path, clock, monkeypatch, phases, nodes, hangs
):
    # This process stands for both ranks.
    monkeypatch.setattr(hang, "save_stacks", lambda folder, processes: None)
    folder, recovery = AttemptFolder(tmp_path), RecoveryConfig(hang_timeout_seconds=30)
    beats = [Heartbeat(folder.heartbeat(rank), clock) for rank in range(2)]
    watch = HangWatch(folder, NodeShare(0, nodes, 2), recovery)
    watch.pulses = {rank: Pulse(clock) for rank in watch.pulses}
    folder.node(0).path.mkdir()
    found = []
    for _ in range(40):
        for beat, phase in zip(beats, phases, strict=True):
            beat.beat(phase, 5)
        found.append(watch.look())
        clock.now += 1
    assert found == [False] * 31 + [hangs] * 9
    assert bool(folder.node(0).error.exists()) is hangs

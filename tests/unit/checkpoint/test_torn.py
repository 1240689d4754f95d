"""A save that a kill or a power cut interrupts at any point never wins."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time

import pytest
import torch

from steadytrain.components.train.checkpoint import CheckpointStore, newest
from steadytrain.components.train.checkpoint.manifest import COMMIT
from steadytrain.components.train.checkpoint.store import committed

from support.checkpoints import same, save
from support.crash import Change, Disk, Recorder

STEPS, RANKS = 4, 2
SEED = 20261121


def parts(step):
    return {
        "model": {"weight": torch.full((40, 9), float(step)), "bias": torch.tensor(float(step))},
        "optimizer": {"weight/exp_avg": torch.full((40, 9), step / 2)},
    }


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """All file system changes of four saves by two ranks and of removing the oldest two."""
    root = tmp_path_factory.mktemp("recorded")
    store = CheckpointStore(root / "checkpoints", keep=2)
    recorder = Recorder(root)
    with recorder.active():
        for step in range(1, STEPS + 1):
            store.retain(save(store, step, parts=parts(step), world_size=RANKS), best_step=0)
    return recorder.changes


def check(folder, at_least, point):
    """Check that the newest checkpoint is at step `at_least` or later and has its own values."""
    found = newest(folder / "checkpoints")
    step = found.step if found else 0
    assert step >= at_least, point
    if found:
        expected = parts(step)
        assert all(same(found.tensors(part), expected[part]) for part in expected), point
        assert found.state() == {"step": step}, point


def commits(changes):
    """Return by step how many changes it takes until COMMIT exists and until it is synced."""
    there, synced = {}, {}
    for count, change in enumerate(changes, 1):
        folder, _, name = change.name.rpartition("/")
        if change.kind == "link" and name == COMMIT:
            there[int(folder[-8:])] = count
        if change.kind == "sync_folder" and "step-" in change.name:
            step = int(change.name[-8:])
            if step in there:
                synced.setdefault(step, count)
    return there, synced


def reached(counts, point):
    return max((step for step, count in counts.items() if count <= point), default=0)


def test_recording_covers_the_whole_save(recorded, tmp_path):
    there, synced = commits(recorded)
    assert list(there) == list(synced) == [1, 2, 3, 4]
    Disk.after(recorded).lay_out(tmp_path / "disk")
    assert [item.step for item in committed(tmp_path / "disk" / "checkpoints")] == [3, 4]


@pytest.mark.slow
def test_torn_checkpoint_is_never_used_after_a_kill_at_any_file_boundary(recorded, tmp_path):
    there, _ = commits(recorded)
    disk = Disk()
    for point, change in enumerate(recorded, 1):
        disk.apply(change)
        if change.kind in ("link", "remove", "folder"):
            disk.lay_out(tmp_path / "disk")
            check(tmp_path / "disk", reached(there, point), (point, change.kind, change.name))


def test_torn_checkpoint_is_never_used_after_a_kill_at_random_bytes(recorded, tmp_path):
    there, _ = commits(recorded)
    total = sum(len(change.content) for change in recorded)
    for offset in random.Random(SEED).sample(range(total), 50):
        point, left = 0, offset
        while left >= len(recorded[point].content):
            left -= len(recorded[point].content)
            point += 1
        cut = recorded[point]
        torn = Change(cut.kind, cut.inode, content=cut.content[:left])
        Disk.after([*recorded[:point], torn]).lay_out(tmp_path / "disk")
        check(tmp_path / "disk", reached(there, point), offset)


LOSSES = {
    "all that was not synced": (lambda _: True, lambda _: True),
    "only contents": (lambda _: True, lambda _: False),
    "only entries": (lambda _: False, lambda _: True),
}


@pytest.mark.slow
@pytest.mark.parametrize("lost", LOSSES)
def test_newest_commit_is_whole_without_any_unsynced_write(recorded, tmp_path, lost):
    """Cut the power after every change. Every checkpoint announced as committed still exists."""
    _, synced = commits(recorded)
    content, entry = LOSSES[lost]
    disk = Disk()
    for point, change in enumerate(recorded, 1):
        disk.apply(change)
        if change.kind != "write":
            disk.lay_out(tmp_path / "disk", lost_content=content, lost_entry=entry)
            _nothing_torn_is_committed(tmp_path / "disk")
            check(tmp_path / "disk", reached(synced, point), (point, change.kind, change.name))


@pytest.mark.slow
def test_newest_commit_is_whole_whichever_unsynced_writes_are_lost(recorded, tmp_path):
    _, synced = commits(recorded)
    generator = random.Random(SEED)
    for _ in range(60):
        point, salt = generator.randrange(1, len(recorded)), generator.random()
        Disk.after(recorded[:point]).lay_out(
            tmp_path / "disk",
            lost_content=lambda inode, salt=salt: random.Random(f"{inode}{salt}").random() < 0.5,
            lost_entry=lambda name, salt=salt: random.Random(f"{name}{salt}").random() < 0.5,
        )
        _nothing_torn_is_committed(tmp_path / "disk")
        check(tmp_path / "disk", reached(synced, point), (point, salt))


def _nothing_torn_is_committed(disk):
    """The order of the syncs alone guarantees this: verification finds nothing wrong."""
    for checkpoint in committed(disk / "checkpoints"):
        checkpoint.verify()


SAVES = """
import itertools, sys, threading, hashlib, json
from pathlib import Path
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.train.checkpoint.manifest import FileEntry, RankRecord
from steadytrain.components.train.checkpoint.store import CheckpointStore

store = CheckpointStore(sys.argv[1], keep=2)
store.begin()
begin = max((item.step for item in __import__(
    "steadytrain.components.train.checkpoint.store", fromlist=["committed"]
).committed(sys.argv[1])), default=0) + 1
content = bytes(300_000)
for step in itertools.count(begin):
    storage = store.path(step).storage
    storage.write_stream("save-rank-0000.model.safetensors", [content] * 4)
    entry = FileEntry(
        name="save-rank-0000.model.safetensors",
        bytes=4 * len(content),
        digest=hashlib.sha256(content * 4).hexdigest(),
    )
    record = RankRecord(rank=0, tensors=[], files=[entry], state={})
    storage.write("save-rank-0000.json", record.model_dump_json().encode())
    manifest = store.commit(step, "save", 1, b"{}", given_up=threading.Event())
    print(step, flush=True)
    store.retain(manifest, best_step=0)
"""


@pytest.mark.slow
def test_process_killed_while_saving_leaves_a_whole_checkpoint(tmp_path):
    """Send SIGKILL at random moments to a process that does nothing but save."""
    folder, generator, told = tmp_path / "checkpoints", random.Random(SEED), 0
    for _ in range(4):
        with subprocess.Popen(
            [sys.executable, "-c", SAVES, str(folder)], stdout=subprocess.PIPE, text=True
        ) as process:
            told = int(process.stdout.readline())
            time.sleep(generator.random() / 20)
            process.send_signal(signal.SIGKILL)
            told = max([told, *map(int, process.stdout.read().split())])

        assert newest(folder).step >= told
        assert all(item.verify() for item in committed(folder))

"""A supervisor that finds its run's state damaged, cannot write it, or died before it could."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from steadytrain.components.shared.errors import BadInput, SteadytrainError
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import (
    CheckpointSkipped,
    Warned,
)
from steadytrain.components.train.attempt import AttemptFolder, AttemptSpec
from steadytrain.components.train.checkpoint import CheckpointStore

from support.checkpoints import save

pytestmark = pytest.mark.slow

RANK = Path(__file__).with_name("rank.py")
DIES_BEFORE_IT_DECIDES = """
import os, signal, sys
from steadytrain.components.shared.config import load
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.launch.process import ProcessLauncher
from steadytrain.components.train.recovery.supervisor import Supervisor
config = load(sys.argv[1])
data = DataRecord.load(Workspace.of(config).record("preprocess"))
rank = [sys.executable, sys.argv[2], "diverge"]
Supervisor._decide = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
with ProcessLauncher(config.compute, rank, imports=()) as launcher:
    Supervisor(config, data, launcher).run()
"""


def spec(workspace, attempt):
    return AttemptSpec.load(AttemptFolder(workspace.attempts / f"{attempt:04d}").spec)


def test_batch_is_skipped_even_if_the_supervisor_died_before_deciding(
    supervisor, workspace, data, config
):
    """Otherwise the same divergence would happen again, and count as the second one."""
    workspace.create()
    workspace.config.write_text(config.to_yaml())
    data.save(workspace.record("preprocess"))
    program = [sys.executable, "-c", DIES_BEFORE_IT_DECIDES, str(workspace.config), str(RANK)]
    assert subprocess.run(program, timeout=300).returncode == -9
    kept = supervisor("finish").ledger.history()
    assert [attempt.ended.failure_class for attempt in kept.attempts] == ["divergence"]
    assert kept.decisions == []

    assert supervisor("finish").run().succeeded
    (decided,) = supervisor("finish").ledger.history().decisions
    assert (decided.attempt, decided.skipped_batch) == (1, 3)
    assert spec(workspace, 2).skipped_batches == (3,)


def test_temporary_ledger_failure_does_not_end_the_run(
    supervisor, workspace, wait_for, monkeypatch
):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    running = supervisor("save")
    folder = workspace.attempts / "0001"

    def disturb():
        wait_for(lambda: (folder / "ready-0").exists())
        time.sleep(0.5)
        with monkeypatch.context() as full:
            full.setattr(os, "pwrite", refuse)
            (folder / "save-1").touch()
            wait_for(lambda: any("retrying" in item.message for item in warned()))
            (folder / "end").touch()
            time.sleep(2)

    def warned():
        return [event for event in read_events(workspace.events) if isinstance(event, Warned)]

    thread = threading.Thread(target=disturb)
    thread.start()
    outcome = running.run()
    thread.join()
    assert outcome.succeeded
    (attempt,) = supervisor("finish").ledger.history().attempts
    assert [item.step for item in attempt.checkpoints] == [1]
    assert attempt.ended.outcome == "finished"


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def binary(path):
    path.write_bytes(random.Random(0).randbytes(999) + b"\n")


def make_folder(path):
    path.unlink()
    path.mkdir()


def make_pipe(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("pattern", "harm"),
    [
        ("lease/*", truncate),
        ("lease/*", make_folder),
        ("events/supervisor.jsonl", binary),
        ("events/supervisor.jsonl", make_pipe),
        ("attempts/0001/spec.json", truncate),
        ("records/preprocess.json", make_pipe),
        ("config.yaml", make_pipe),
    ],
)
def test_damaged_file_does_not_stop_the_run(supervisor, workspace, config, pattern, harm):
    first = supervisor("diverge", decide=stop_after_skip)
    first.run()
    before = first.ledger.history()
    (path,) = workspace.folder.glob(pattern)
    harm(path)
    # A lease whose holder is unknown has to expire; the agents wait half as long for a renewal.
    recovery = config.recovery.model_dump() | {"lease_seconds": 20}
    assert supervisor("finish", recovery=recovery).run().succeeded
    after = supervisor("finish").ledger.history()
    assert after.decisions == before.decisions
    assert after.attempts[: len(before.attempts)] == before.attempts
    assert spec(workspace, len(after.attempts)).skipped_batches == (7,)


def test_flipped_bit_in_the_ledger_is_restored_and_reported(supervisor, workspace):
    first = supervisor("diverge", decide=stop_after_skip)
    first.run()
    (path,) = workspace.events.glob("ledger-*.jsonl")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    assert supervisor("finish").run().succeeded
    assert spec(workspace, 2).skipped_batches == (7,)
    told = [event.message for event in read_events(workspace.events) if isinstance(event, Warned)]
    assert any(str(path) in message and "could be restored" in message for message in told)


def stop_after_skip(history, failure):
    from steadytrain.components.shared.events.types import RecoveryDecision

    return RecoveryDecision("stop", "enough", skipped_batch=7)


def test_lost_ledger_is_an_error(supervisor, workspace):
    supervisor("diverge", decide=stop_after_skip).run()
    for path in workspace.events.iterdir():
        path.unlink()
    with pytest.raises(SteadytrainError, match="attempt 1 left traces") as raised:
        supervisor("finish").run()
    Path(raised.value.remedy.rpartition("touch ")[2]).touch()
    outcome = supervisor("finish").run()
    assert outcome.succeeded
    # The lost attempt's files stay as they are.
    assert (workspace.attempts / "0002").is_dir()


def test_foreign_checkpoint_is_refused_before_the_first_attempt(supervisor, workspace):
    theirs = workspace.checkpoints / "step-00000500" / "pytorch_model.bin"
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(b"weights")
    with pytest.raises(BadInput, match="was not written by steadytrain"):
        supervisor("finish").run()
    assert theirs.exists()
    assert not workspace.attempts.exists()


def skipped(workspace):
    found = [item for item in read_events(workspace.events) if isinstance(item, CheckpointSkipped)]
    return [(item.attempt, item.step, item.resumed_from_step, item.reason) for item in found]


def test_checkpoint_that_is_damaged_or_gone_is_an_event(supervisor, workspace):
    store = CheckpointStore(workspace.checkpoints, keep=9)
    for step in (1, 2, 3):
        save(store, step)
    (damaged,) = (workspace.checkpoints / "step-00000003").glob("*.model.safetensors")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    supervisor("finish").run()
    ((*first, reason),) = skipped(workspace)
    assert first == [1, 3, 2]
    assert str(damaged) in reason

    shutil.rmtree(workspace.checkpoints / "step-00000002")
    supervisor("finish").run()
    assert skipped(workspace)[1:] == [(2, 2, 1, f"it is not in {workspace.checkpoints} any more")]

    shutil.rmtree(workspace.checkpoints / "step-00000001")
    supervisor("finish").run()
    supervisor("finish").run()
    assert [item[:3] for item in skipped(workspace)[2:]] == [(3, 1, 0)]

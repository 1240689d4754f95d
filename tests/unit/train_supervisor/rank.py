"""A stand-in for a rank that behaves as asked, quickly: `python rank.py HOW ... FOLDER`.

RANK says which of several ranks it is. "1:HOW" applies to rank 1 alone. The others then wait
until they are asked to exit, or with "1:HOW:OTHER" do OTHER.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import psutil

from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.config import load
from steadytrain.components.shared.events.types import CheckpointSaved, DecisionMade, Validated
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.attempt import (
    AttemptFolder,
    AttemptResult,
    AttemptSpec,
    Heartbeat,
    RankError,
)

RANK = int(os.environ.get("RANK", "0"))


def main(how: str, path: str) -> int:
    folder = AttemptFolder(Path(path))
    only, *particular = how.split(":")
    if particular:
        wanted, act, other = (*how.split(":"), "wait")[:3]
        only = act if int(wanted) == RANK else other
    print(f"rank {RANK} does {only}", flush=True)
    (folder.path / f"ready-{RANK}").touch()
    return ACTS[only](folder)


def finish(folder: AttemptFolder) -> int:
    if RANK == 0:
        result(folder, "finished")
    return 0


def finish_after_report(folder: AttemptFolder) -> int:
    """Finish although an error is reported, as a rank does that continues after a hang."""
    report(folder)
    return finish(folder)


def finish_badly(folder: AttemptFolder) -> int:
    finish(folder)
    return 7


def finish_second(folder: AttemptFolder) -> int:
    """Fail in the first attempt, and finish in the second."""
    return finish(folder) if AttemptSpec.load(folder.spec).attempt == 2 else crash(folder)


def crash(folder: AttemptFolder) -> int:
    raise ZeroDivisionError("stand-in")


def crash_late(folder: AttemptFolder) -> int:
    """Crash as soon as another rank is waiting."""
    while not list(folder.path.glob("waiting-*")):
        time.sleep(0.02)
    return crash(folder)


def report(folder: AttemptFolder) -> int:
    RankError(
        rank=RANK,
        time=time.time(),
        kind="OutOfMemoryError",
        message="CUDA out of memory.",
        traceback="Traceback",
        step=3,
    ).save(folder.error(RANK))
    return 1


def diverge(folder: AttemptFolder) -> int:
    """Report a loss that is not finite after step 3."""
    RankError(
        rank=RANK,
        time=time.time(),
        kind="Diverged",
        message="loss is nan",
        traceback="Traceback",
        step=3,
    ).save(folder.error(RANK))
    return 1


def save(folder: AttemptFolder) -> int:
    """Save a checkpoint for each file `save-<step>`, and finish once a file `end` exists."""
    spec = AttemptSpec.load(folder.spec)
    stream = Workspace.of(load(Path(spec.config))).stream("rank-0")
    step = 1
    while not (folder.path / "end").exists():
        if (folder.path / f"save-{step}").exists():
            saved = CheckpointSaved(
                attempt=spec.attempt, step=step, checkpoint="c", bytes=1, seconds=0.1
            )
            stream.emit(saved)
            step += 1
        time.sleep(0.02)
    return finish(folder)


def fit(folder: AttemptFolder) -> int:
    """Run out of memory with a micro-batch above 2, else finish."""
    micro = AttemptSpec.load(folder.spec).batch.micro_batch_size
    return report(folder) if micro > 2 else finish(folder)


def halve_first(folder: AttemptFolder) -> int:
    """In the first attempt, halve the micro-batch twice and get killed. Finish in the second."""
    spec = AttemptSpec.load(folder.spec)
    stream = Workspace.of(load(Path(spec.config))).stream(f"rank-{spec.attempt}")
    for size in (4, 2) if spec.attempt == 1 else ():
        decision = DecisionMade(
            attempt=1,
            failure_class="gpu_oom",
            action="repeat_step",
            reason="smaller micro-batch",
            batch=BatchSettings(size),
        )
        stream.emit(decision)
    return kill_first(folder)


def kill_first(folder: AttemptFolder) -> int:
    """Get killed in the first attempt, and finish in the second."""
    return finish(folder) if AttemptSpec.load(folder.spec).attempt == 2 else kill(folder)


def allocate(folder: AttemptFolder) -> int:
    """Use up all the memory."""
    taken = []
    while True:
        taken.append(b"x" * (1 << 22))


def kill(folder: AttemptFolder) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def segfault(folder: AttemptFolder) -> int:
    """Log a handled exception as a library does, then crash in native code after step 4."""
    print("step 3", flush=True)
    try:
        raise ModuleNotFoundError("No module named 'fused'")
    except ModuleNotFoundError:
        traceback.print_exc()
    Heartbeat(folder.heartbeat(RANK)).beat("train", 4)
    os.kill(os.getpid(), signal.SIGSEGV)
    return 0


def segfault_first(folder: AttemptFolder) -> int:
    """Crash in native code in the first attempt, and finish in the second."""
    return finish(folder) if AttemptSpec.load(folder.spec).attempt == 2 else segfault(folder)


def wait(folder: AttemptFolder) -> int:
    """Wait for SIGTERM, and exit as preempted."""
    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(1))
    (folder.path / f"waiting-{RANK}").touch()
    while not told:
        time.sleep(0.02)
    if RANK == 0:
        result(folder, "preempted")
    # Like the real rank, so that a second SIGTERM does not interrupt its exit.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return 143


def stick(folder: AttemptFolder) -> int:
    """Read a file that is never answered (support/fuse.py). Nothing can kill this process then."""

    def mark_waiting() -> None:
        while not Path(os.environ["UNANSWERED_FILE"]).exists():
            time.sleep(0.02)
        (folder.path / f"waiting-{RANK}").write_text(str(os.getpid()))

    threading.Thread(target=mark_waiting).start()
    return len(Path(os.environ["STUCK_FILE"]).read_bytes())


def ignore(folder: AttemptFolder) -> int:
    """Hang and ignore SIGTERM, and start a process that hangs too."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    (folder.path / f"waiting-{RANK}").touch()
    time.sleep(600)
    return 0


def orphan(folder: AttemptFolder) -> int:
    """Leave behind a process that is no longer in this process's tree."""
    leave = (
        "import os, sys, time; os.fork() and os._exit(0); "
        "open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    )
    told = folder.path / "orphan"
    subprocess.run([sys.executable, "-c", leave, told], start_new_session=True, check=True)
    while not told.exists() or not told.read_text():
        time.sleep(0.02)
    return finish(folder)


def validate(folder: AttemptFolder) -> int:
    """Validate repeatedly until the stop file says which outcome to report."""
    spec = AttemptSpec.load(folder.spec)
    stream = Workspace.of(load(Path(spec.config))).stream("rank-0")
    step = 0
    while not folder.stop.exists():
        step += 1
        stream.emit(
            Validated(
                attempt=spec.attempt, step=step, epoch=0.1, metrics={"loss": 1 / step}, best=True
            )
        )
        time.sleep(0.02)
    result(folder, folder.stop.read_text(), step=step)  # type: ignore[arg-type]
    return 0


def tell(folder: AttemptFolder) -> int:
    for name in ("OMP_NUM_THREADS", "WORLD_SIZE", "MASTER_ADDR", "NCCL_SOCKET_IFNAME"):
        print(f"{name}={os.environ.get(name)}")
    print(f"COMMAND={' '.join(psutil.Process().cmdline())}")
    return finish(folder)


def result(folder: AttemptFolder, outcome: str, step: int = 5) -> None:
    AttemptResult(
        outcome=outcome,  # type: ignore[arg-type]
        step=step,
        max_steps=5,
        best_step=5,
        best_score=1.0,
        metric="loss",
        parameters=1,
    ).save(folder.result)


ACTS = {
    "halve_first": halve_first,
    "allocate": allocate,
    "kill_first": kill_first,
    "segfault": segfault,
    "segfault_first": segfault_first,
    "finish": finish,
    "finish_after_report": finish_after_report,
    "finish_badly": finish_badly,
    "finish_second": finish_second,
    "crash": crash,
    "diverge": diverge,
    "save": save,
    "crash_late": crash_late,
    "fit": fit,
    "report": report,
    "kill": kill,
    "wait": wait,
    "ignore": ignore,
    "orphan": orphan,
    "stick": stick,
    "validate": validate,
    "tell": tell,
}

if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

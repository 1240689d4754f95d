"""Steps that take half a second each; registrations are recorded in a file."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from steadytrain.components.report.step import write_page
from steadytrain.components.shared.config import RunConfig, from_parameters, load
from steadytrain.components.shared.records import GateRecord, RegistrationRecord, Subject
from steadytrain.components.shared.stage import Stage, stage
from steadytrain.components.shared.stopping import STOP_SIGNALS
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.workspace import Workspace

STEP_SECONDS = 0.5
DEADLY = "QUICK_STEPS_KILL"
"""Names a step that kills itself, and the signal: "evaluate SIGSEGV"."""
DEAF = "QUICK_STEPS_DEAF"
"""Names steps that ignore signals and never end."""
SUBJECT = Subject(
    run_id="quick", model_name="quick", champion_alias="champion", weights_digest="", rules=""
)


def preprocess(*, parameters: Mapping[str, Any], resolved: Any, **_: Any) -> None:
    config = from_parameters(**parameters)
    with stage(config, "begin") as current:
        workspace = current.workspace
        LocalStorage(workspace.folder).write(workspace.config.name, config.to_yaml().encode())
    shutil.copyfile(workspace.config, resolved.path)
    with stage(config, "preprocess") as current:
        work(current)


def train(*, resolved: Any, **_: Any) -> None:
    with stage(load(Path(resolved.path)), "train") as current, helper():
        work(current)


def evaluate(*, resolved: Any, **_: Any) -> bool:
    with stage(load(Path(resolved.path)), "evaluate") as current:
        work(current)
        gate = GateRecord(
            promoted=True, reason="quick", metric="loss", greater_is_better=False,
            candidate=1.0, margin=0.0, subject=SUBJECT,
        )  # fmt: skip
        write(current.workspace, "gate", gate)
    return True


def register(*, resolved: Any, **_: Any) -> None:
    note(load(Path(resolved.path)), "register", champion=False)


def promote(*, resolved: Any, **_: Any) -> None:
    note(load(Path(resolved.path)), "promote", champion=True)


def report(*, parameters: Mapping[str, Any], **_: Any) -> None:
    config = from_parameters(**parameters)
    if not Workspace.of(config).events.exists():
        return
    with stage(config, "report") as current:
        work(current)
        write_page(current.workspace)


def note(config: RunConfig, step: str, *, champion: bool) -> None:
    with stage(config, step) as current:
        work(current)
        current.check()
        (current.workspace.folder / f"{step}-noted").write_text(str(time.time()))
        record = RegistrationRecord(
            model_name="quick", version="1", model_uri="models:/quick/1", champion=champion,
            reason="quick",
        )  # fmt: skip
        write(current.workspace, step, record)


def write(workspace: Workspace, step: str, record: Any) -> None:
    record.save(workspace.record(step))


def work(current: Stage) -> None:
    step, _, name = os.environ.get(DEADLY, "").partition(" ")
    if step == current.name:
        os.kill(os.getpid(), signal.Signals[name])
    if current.name in os.environ.get(DEAF, "").split():
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: None)
        (current.workspace.folder / f"{current.name}-deaf").touch()
        time.sleep(600)
    end = time.monotonic() + STEP_SECONDS
    while time.monotonic() < end:
        time.sleep(0.05)
        current.check()


@contextlib.contextmanager
def helper() -> Iterator[None]:
    """Run a process in its own session, like a training run's agents."""
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        yield
    finally:
        process.kill()
        process.wait()

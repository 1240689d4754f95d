"""Steps that take half a second each; registrations are recorded in a file."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

from steadytrain.components.report.step import write_page
from steadytrain.components.shared.config import RunConfig
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
HELD = "QUICK_STEPS_HELD"
"""Names a step that works until it is stopped, or until the run has a file `STEP-on`."""
SUBJECT = Subject(
    run_id="quick", model_name="quick", champion_alias="champion", weights_digest="", rules=""
)


def perform(name: str, config: RunConfig, agent: object = None) -> None:
    _STEPS[name](config)


def preprocess(config: RunConfig) -> None:
    with stage(config, "begin") as current:
        workspace = current.workspace
        LocalStorage(workspace.folder).write(workspace.config.name, config.to_yaml().encode())
    with stage(config, "preprocess") as current:
        work(current)


def train(config: RunConfig) -> None:
    with stage(config, "train") as current, helper():
        work(current)


def evaluate(config: RunConfig) -> None:
    with stage(config, "evaluate") as current:
        work(current)
        gate = GateRecord(
            promoted=True, reason="quick", metric="loss", greater_is_better=False,
            candidate=1.0, margin=0.0, subject=SUBJECT,
        )  # fmt: skip
        write(current.workspace, "gate", gate)


def register(config: RunConfig) -> None:
    note(config, "register", champion=False)


def promote(config: RunConfig) -> None:
    note(config, "promote", champion=True)


def report(config: RunConfig) -> None:
    if not Workspace.of(config).events.exists():
        return
    with stage(config, "report") as current:
        work(current)
        write_page(current.workspace)


def note(config: RunConfig, step: str, *, champion: bool) -> None:
    with stage(config, step) as current:
        work(current)
        current.check()
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
    held, on = current.name == os.environ.get(HELD), current.workspace.folder / f"{current.name}-on"
    end = time.monotonic() + STEP_SECONDS
    while (held and not on.exists()) or time.monotonic() < end:
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


_STEPS = {step.__name__: step for step in (preprocess, train, evaluate, register, promote, report)}

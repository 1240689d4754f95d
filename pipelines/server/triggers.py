"""Start one run for new data, no matter who asks, on which machine, and how often.

The last started run is recorded in storage, and read and written under a lock. The run's name comes
from the data that it is for. The server may have several runs of that name, if one was started
right before a kill, or lost a step and was resubmitted. As long as one of them is active, nothing
else is started. If it fails, it is started again for its data, a few times and after growing waits,
and continues where it stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import yaml
from pydantic import BaseModel, ConfigDict

from steadytrain.components.preprocess.sources import SourceFile, find_files
from steadytrain.components.shared import retry
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.digest import value_digest
from steadytrain.components.shared.effects import DATA_KINDS
from steadytrain.components.shared.errors import BadInput, RunBusy, ServerError, StorageError
from steadytrain.components.shared.kubeflow.connection import Server
from steadytrain.components.shared.lease import EXPIRY_SECONDS, lock
from steadytrain.components.shared.pagination import named, pages
from steadytrain.components.shared.quantities import moment
from steadytrain.components.shared.storage import Storage, open_storage
from steadytrain.components.shared.storage.local import local_errors
from steadytrain.pipelines.compile import compile_pipeline
from steadytrain.pipelines.pod_names import Pipeline
from steadytrain.pipelines.server.follow import ENDED
from steadytrain.pipelines.server.submission import Submission, start, upload

_LOCK_SECONDS: Final = EXPIRY_SECONDS + 30.0
"""Longer than the lock of a killed trigger lasts."""
_STATE: Final = "last.json"
TRIES: Final = 3
"""How often a run is started for the same data, if it fails."""
_RETRY_SECONDS: Final = (600.0, 3600.0)
"""How long to wait after each failure, in case its cause passes."""


@dataclass(frozen=True)
class Trigger:
    """What to start, and where to record what was started.

    state: a folder or s3:// address that everyone who triggers this shares.
    """

    submission: Submission
    pipeline: Pipeline
    state: str

    @classmethod
    def of(cls, submission: Submission, pipeline: Pipeline, state: str = "") -> Trigger:
        """Return a trigger. Its state is by default in the folder `triggers` of the output.

        Raises:
            BadInput: changes to the data cannot be seen from outside.
        """
        config = submission.config
        for field, address in config.data.addresses:
            if address.partition(":")[0] in DATA_KINDS.keys() - {"package", "s3"}:
                raise BadInput(
                    f"{field} = {address!r}: changes to such a data set cannot be watched",
                    remedy="watch a folder or an s3:// prefix, or use a schedule",
                )
        return cls(submission, pipeline, state or f"{config.output.rstrip('/')}/triggers")

    @property
    def config(self) -> RunConfig:
        return self.submission.config

    def seen(self) -> str:
        """Return a digest of the data files' names, sizes, and times or tags, without reading them.

        Raises:
            BadInput: there are no files.
        """
        data = self.config.data
        files = [
            file for _, address in data.addresses for file in find_files(address, data.exclude)
        ]
        return value_digest(sorted(map(_mark, files)))


class _Last(BaseModel):
    """The last run that was started.

    run_id: KFP's id; "" while the run is being started.
    tries: how often it was started.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    digest: str
    run: str
    run_id: str = ""
    tries: int = 1


@dataclass(frozen=True)
class Answer:
    """The result of asking for a run.

    kind: "started"; "known" if these data already had their run; "failed" if it failed and is not
        started again yet, or not any more; "busy" if another run is active.
    why: the failure, and what follows from it; "" without one.
    settled: whether no further run starts until the data change.
    """

    kind: Literal["started", "known", "failed", "busy"]
    run: str
    run_id: str
    url: str
    why: str = ""
    settled: bool = False

    def __str__(self) -> str:
        words = {
            "started": f"started {self.run}",
            "known": f"nothing to start: {self.run} was started for these data",
            "failed": f"nothing started: {self.run} failed",
            "busy": f"nothing started: {self.run} is running",
        }
        address = f" ({self.url})" if self.url else ""
        return f"{words[self.kind]}{address}{f': {self.why}' if self.why else ''}"


def trigger(server: Server, what: Trigger) -> Answer:
    """Start a run for the current data, unless they already had theirs or a run is active.

    A run that failed is started again after a while, up to TRIES times in all.

    Raises:
        RunBusy: another process has been deciding for minutes.
        BadInput: there are no data, or the pipeline cannot be used.
        ServerError: the server cannot be used.
        StorageError: the record of what was started cannot be read or written.
    """
    digest, name = what.seen(), what.config.name
    with contextlib.ExitStack() as held:
        with local_errors("use", Path(what.state)):
            check = held.enter_context(
                lock(what.state, f"trigger-{name}", wait_seconds=_LOCK_SECONDS)
            )
        last = _read(what)
        run = _run_of(server, last) if last else None
        started, why = _Last(digest=digest, run=f"{name}-{digest[:8]}"), ""
        if last and run:
            here = Answer("known", last.run, run.run_id, server.link("runs", run.run_id))
            if last.digest == digest:
                # If the trigger was killed right after it started the run, the id is still missing.
                if last.run_id != run.run_id:
                    _write(what, last.model_copy(update={"run_id": run.run_id}))
                if run.state != "FAILED":
                    return dataclasses.replace(here, settled=run.state in ENDED)
                why = _reason(run)
                if wait := _not_yet(run, last.tries):
                    settled, why = last.tries >= TRIES, f"{why}; {wait}"
                    return dataclasses.replace(here, kind="failed", why=why, settled=settled)
                started = last.model_copy(update={"tries": last.tries + 1, "run_id": ""})
                why = f"try {started.tries} of {TRIES}, because it failed: {why}"
            elif run.state not in ENDED:
                return dataclasses.replace(here, kind="busy")
        check()
        _write(what, started)
        run_id = _start(server, what, started.run)
        _write(what, started.model_copy(update={"run_id": run_id}))
        return Answer("started", started.run, run_id, server.link("runs", run_id), why)


def _reason(run: Any) -> str:
    """Return why a run failed, as far as the server says."""
    message = redact((run.error and run.error.message) or "").strip().partition("\n")[0]
    return message or "its page and its report say why"


def _not_yet(run: Any, tries: int) -> str:
    """Return why a failed run is not started again now; "" if it is."""
    if tries >= TRIES:
        return (
            f"it was started {tries} times and is not started again for these data; fix the "
            "cause, then use steadytrain submit"
        )
    due = (run.finished_at or run.created_at).timestamp() + _RETRY_SECONDS[tries - 1]
    return f"it is started again after {moment(due)}" if time.time() < due else ""


def watch(
    server: Server,
    what: Trigger,
    *,
    every_seconds: float,
    quiet_seconds: float,
    notify: Callable[[str], object],
    wait: Callable[[float], bool],
) -> list[Answer]:
    """Check the data repeatedly, and start a run when they have changed and are quiet again.

    Args:
        every_seconds: time from one check to the next.
        quiet_seconds: how long the data must stay unchanged, since an upload may be in progress.
        notify: called with what was started, and with problems.
        wait: waits for a number of seconds; returns True to stop watching.

    Returns:
        The runs that were started.

    Raises:
        ServerError: the server denied access for too long, or refused permanently.
    """
    seen, since, done, reported, shown = "", 0.0, "", "", ""
    started: list[Answer] = []
    outage = retry.Retry(seconds=retry.FOREVER, denied_seconds=retry.AWAY_SECONDS)
    while True:
        now = time.monotonic()
        try:
            digest = what.seen()
            if digest != seen:
                seen, since = digest, now
            if digest != done and now - since >= quiet_seconds:
                answer = trigger(server, what)
                outage.reset()
                started += [answer] if answer.kind == "started" else []
                done = digest if answer.settled else ""
                # A run that was reported is followed in silence, unless it fails.
                known = answer.kind == "known" and answer.run == shown
                message = reported if known else str(answer)
                shown = answer.run
            else:
                message = reported
        except (BadInput, RunBusy, StorageError, ServerError) as error:
            if isinstance(error, ServerError) and not outage.may_pass(error):
                raise
            message = error.message
        if message != reported:
            reported = message
            notify(message)
        if wait(every_seconds):
            return started


def _mark(file: SourceFile) -> list[Any]:
    changed = file.location.stat().st_mtime_ns if isinstance(file.location, Path) else 0
    return [file.name, file.size, file.tag, changed]


def _start(server: Server, what: Trigger, run: str) -> str:
    config = what.config.model_copy(update={"run": run})
    submission = dataclasses.replace(what.submission, config=config)
    with tempfile.TemporaryDirectory() as folder:
        path = compile_pipeline(
            Path(folder, "pipeline.yaml"), pipeline=what.pipeline, shape=config.pipeline
        )
        version = upload(server, path)
    return start(server, submission, version).run_id


def _run_of(server: Server, last: _Last) -> Any:
    """Return the run on the server: an active one if possible, or else the newest.

    None means that it was never started, or was deleted.
    """
    of = {"namespace": server.namespace} if server.namespace else {}
    # Search for a part of the name: the server's pages call a repeated run "Clone of ...".
    alike: Iterator[Any] = pages(
        server.runs.run_service_list_runs,
        "runs",
        filter=named("display_name", last.run, "IS_SUBSTRING"),
        **of,
    )
    runs = [run for run in alike if _name(run) == last.run]
    return max(runs, key=lambda run: (run.state not in ENDED, run.created_at), default=None)


def _name(run: Any) -> str:
    """Return the name of the steadytrain run behind a run on the server."""
    parameters = (run.runtime_config and run.runtime_config.parameters) or {}
    content: Any = None
    with contextlib.suppress(yaml.YAMLError):
        content = yaml.safe_load(str(parameters.get("config", "")))
    configured = content.get("run") if isinstance(content, dict) else None
    return str(parameters.get("run") or configured or run.display_name)


def _read(what: Trigger) -> _Last | None:
    storage = _storage(what)
    try:
        return _Last.model_validate_json(storage.read(_STATE))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise StorageError(
            f"{storage.uri}/{_STATE} was not written by a trigger",
            remedy="remove it: a run then starts for the current data",
        ) from error


def _write(what: Trigger, last: _Last) -> None:
    _storage(what).write(_STATE, last.model_dump_json().encode())


def _storage(what: Trigger) -> Storage:
    return open_storage(what.state).sub(what.config.name)

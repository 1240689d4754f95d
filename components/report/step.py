"""The report step. It runs last, whatever happened before, and never fails a run.

An exit handler cannot take artifacts from the steps before it. So `kfp_report` resolves the
configuration again from the same parameters, which gives the same run.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from steadytrain.components.observe.otlp.sink import OtlpDelivery
from steadytrain.components.observe.tensorboard_sink import TensorBoardDelivery
from steadytrain.components.observe.wandb_sink import WandbDelivery
from steadytrain.components.pages.html import html
from steadytrain.components.report.facts import Facts, Spending, gather
from steadytrain.components.report.report_page import render
from steadytrain.components.report.sentences import as_line
from steadytrain.components.report.story import RunSummary, executions, outcome, without_steps
from steadytrain.components.shared import webhook
from steadytrain.components.shared.config import RunConfig, from_parameters
from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.digest import value_digest
from steadytrain.components.shared.errors import SteadytrainError
from steadytrain.components.shared.events.types import Event, Terminated, Warned
from steadytrain.components.shared.lease import is_held
from steadytrain.components.shared.stage import stage
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.tracking import finish_run
from steadytrain.components.shared.tracking.notes import warn
from steadytrain.components.shared.tracking.pull_sink import is_installed, run_in_parallel
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.launch.removal import how_terminated, remove_unfinished, works_in
from steadytrain.components.train.recovery.resubmit import may_resubmit, resubmit

if TYPE_CHECKING:
    from kfp import dsl

_LOST: Final = {"unfinished", "stopped"}
"""States of a run that lost a step: it was killed, or was asked to stop along with its pod. So did
a run that failed because a server was down for too long."""


def write_page(workspace: Workspace, *, running: bool = False) -> Facts:
    """Write the page and nothing else, because another process may be using the run at this moment.

    Args:
        running: whether one does.

    Raises:
        StorageError: the page cannot be written.
    """
    facts = gather(workspace, running=running)
    LocalStorage(workspace.report.parent).write(workspace.report.name, render(facts).encode())
    return facts


def resubmit_lost(config: RunConfig, job: str, progress: int | None = None) -> Event | None:
    """Submit the pipeline again if a step was lost.

    Args:
        progress: as for `run`.

    Returns:
        The event to report: the resubmission, or why there was none. None if no step was lost, if
        resubmission is off, if this pipeline run was already submitted again, or if the run was
        terminated or is in use elsewhere.
    """
    if not may_resubmit(config, job):
        return None
    facts = gather(Workspace.of(config))
    ended = outcome(facts)
    if ended.state not in _LOST and not (ended.failure and ended.failure.passing):
        return None
    return resubmit(config, job, facts.history.last_step if progress is None else progress)


def _lost(workspace: Workspace) -> bool:
    return outcome(gather(workspace)).state in _LOST


def run(config: RunConfig, job: str = "", *, progress: int | None = None) -> Path:
    """Clean up after a lost step, write the page, and end the run in MLflow.

    Remove the jobs of a lost train step. If a step was lost, submit the pipeline again, unless it
    was terminated. If another supervisor is training the run, this pipeline was a second one and
    was refused, so only write the page.

    Args:
        job: KFP's id of the run; "" if it is not a step of a pipeline.
        progress: how far the run has come, to count resubmissions without progress. None means its
            last step.

    Returns:
        The page's path.

    Raises:
        StorageError: the page cannot be written.
    """
    problems, workspace = remove_unfinished(config, job), Workspace.of(config)
    how = how_terminated() if job else ""
    lease = LocalStorage(workspace.lease)
    # `remove_unfinished` waits for a lost supervisor's lease to expire, unless the pipeline was
    # terminated. If the lease is still held after that, its holder is training the run.
    if is_held(lease) and not (how and works_in(lease, job)):
        write_page(workspace, running=True)
        return workspace.report
    with stage(config, "report") as current:
        for problem in problems:
            current.emit(Warned(stage="report", message=f"not removed: {problem}"))
        if how and _lost(workspace):
            current.emit(Terminated(kfp_run=job, how=how))
        elif resubmitted := resubmit_lost(config, job, progress):
            current.emit(resubmitted)
        facts = write_page(workspace)
        run_summary = outcome(facts)
        current.summary = run_summary.sentence
        cut = facts.spans
        finish_run(
            config,
            workspace,
            run_summary.state == "finished",
            stopped=run_summary.state in ("stopped", "terminated"),
            spent=Spending.of(facts).metrics(),
            moment=cut[-1].end if cut else 0.0,
        )
    # Now this step's own span is complete.
    send_unsent(config, workspace)
    return workspace.report


def notify(workspace: Workspace) -> None:
    """Report how the run ended, if that is new and a webhook is configured."""
    if not webhook.is_set():
        return
    facts = gather(workspace)
    message = _message(facts)
    if message is None:
        return
    digest = value_digest([message, _ended(facts) if message["event"] == "failed" else 0])
    storage = LocalStorage(workspace.notified.parent)
    name = workspace.notified.name
    if storage.exists(name) and storage.read(name).decode() == digest:
        return
    failure = webhook.call(message)
    if not failure:
        storage.write(name, digest.encode())
        return
    text = f"the webhook ({webhook.VARIABLE}) was not notified that the run {message['event']}"
    workspace.add_events("report", Warned(stage="report", message=f"{text}: {failure}"))


def _message(facts: Facts) -> dict[str, str] | None:
    """Return what to report, or None. `text` is a full sentence, because chat services show it."""
    run_summary = outcome(facts)
    promoted = facts.promotion if run_summary.state == "finished" else None
    common = {
        "run": facts.workspace.run_id,
        "name": str(facts.setting("name") or ""),
        "text": run_summary.sentence,
        "report": str(facts.workspace.report),
    }
    if promoted is not None and promoted.champion:
        more = {"event": "promoted", "model": promoted.model_name, "version": promoted.version}
        return _plain(common | more | {"reason": promoted.reason})
    if run_summary.state not in ("failed", "unfinished"):
        return None
    more = {"event": "failed"}
    if run_summary.failure:
        more |= run_summary.failure.as_plain()
    attempts = facts.history.attempts
    if attempts and attempts[-1].ended and more.get("stage", "train") == "train":
        more["failure_class"] = attempts[-1].ended.failure_class
    return _plain(common | more)


def _plain(content: dict[str, str]) -> dict[str, str]:
    """Remove empty values and secrets, and cut long texts."""
    return {name: redact(text)[:2000] for name, text in content.items() if text}


def _ended(facts: Facts) -> float:
    """Return when the last step ended. The same failure at another time is a new one."""
    return max((item.end for item in executions(facts.events)), default=0.0)


def kfp_report(*, page: dsl.HTML, **parameters: Any) -> None:
    """Write the report, end the run in MLflow, and call the webhook if one is configured.

    If no step of the run has started, for example because there was no new data, write only a note.
    The story is the last line of the log.
    """
    config = from_parameters(**parameters)
    workspace = Workspace.of(config)
    if not workspace.events.exists():
        print_story(without_steps(workspace, parameters["job"]), page)
        return
    try:
        shutil.copyfile(run(config, parameters["job"]), page.path)
    finally:
        notify(workspace)
        print(as_line(outcome(gather(workspace))))


def print_story(run_summary: RunSummary, page: dsl.HTML) -> None:
    """Write a page that is only the story of a run that has no folder, and print the story."""
    text = html("sentence", kind="run", name="Report", sentence=run_summary.sentence, moves=[])
    Path(page.path).write_text(text, encoding="utf-8")
    print(as_line(run_summary))


_SINKS: Final = ("otlp", "tensorboard", "wandb")
FINISH_SECONDS: Final = 60.0
"""How long the sinks may send, all at the same time, before they start no further batch."""
HANGING_SECONDS: Final = 15.0
"""How much longer a batch that was started may take."""


def send_unsent(config: RunConfig, workspace: Workspace) -> bool:
    """Send what the run's sinks lack. A sink whose package is not installed here is left out.

    Returns:
        Whether everything has been sent. If not, the run's events contain a warning.
    """
    deadline = time.monotonic() + FINISH_SECONDS
    late = partial(_is_past, deadline)
    ours = (name for name in config.tracking.sinks if name in _SINKS and is_installed(name))
    works = {name: partial(_catch_up, name, config, workspace, late) for name in ours}
    failures = run_in_parallel(works, lambda _: FINISH_SECONDS + HANGING_SECONDS)
    for sink, error in failures.items():
        if not isinstance(error, SteadytrainError | TimeoutError):
            raise error
        reason = error.message if isinstance(error, SteadytrainError) else f"{sink}: {error}"
        warn(workspace, f"{reason}; `steadytrain report` sends the rest to {sink}")
    return not failures


def _is_past(deadline: float) -> bool:
    return time.monotonic() > deadline


def _catch_up(
    sink: str, config: RunConfig, workspace: Workspace, give_up: Callable[[], bool]
) -> None:
    if sink == "otlp":
        OtlpDelivery(config, workspace).catch_up(give_up=give_up)
    elif sink == "tensorboard":
        TensorBoardDelivery(workspace).catch_up(give_up=give_up)
    else:
        with closing(WandbDelivery(config, workspace)) as delivery:
            delivery.catch_up(give_up=give_up)

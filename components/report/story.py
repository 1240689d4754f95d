"""What happened in a run: its steps, its attempts, and how it ended.

`outcome` is the one place that says how a run is doing. The report, `list`, `explain`, `ui`, `top`
and `submit --wait` show its state and its sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, TypeVar

from steadytrain.components.report.facts import Facts
from steadytrain.components.shared.events import Event
from steadytrain.components.shared.events.types import (
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    PodsPending,
    Resubmitted,
    StepFailed,
    StepFinished,
    StepStarted,
    Terminated,
    TrainingStarted,
    TrainingStep,
    Validated,
    skipped,
)
from steadytrain.components.shared.quantities import number
from steadytrain.components.shared.workspace import Workspace, take_data_check

E = TypeVar("E", bound=Event)
StepState = Literal["finished", "reused", "failed", "stopped", "unfinished"]
RunState = Literal[
    "running",
    "pending",
    "finished",
    "failed",
    "stopped",
    "terminated",
    "unfinished",
    "resubmitted",
    "unchanged",
    "empty",
]

FIRST_STEP, REPORT_STEP = "begin", "report"
TUNE_STEP, WINNER_STEP = "tune", "winner"
"""Steps of the pipeline `tune`. The winner is evaluated and registered in a run of its own."""
SEARCH_STEP = "search"
"""Step of the pipeline `automl`. Its winner has the steps of a study's winner."""
FOLDS_STEP = "cross-validate"
"""The only step of the pipeline `cross-validate`."""


@dataclass(frozen=True)
class Execution:
    """One execution of a step. `failure` is set if it failed or was stopped.

    reused_from: the other run whose result it uses, if it does.
    skipped: how far the clock was set forward meanwhile.
    """

    stage: str
    state: StepState
    start: float
    end: float
    skipped: float = 0.0
    summary: str = ""
    failure: StepFailed | None = None
    reused_from: str = ""

    @property
    def seconds(self) -> float:
        return self.end - self.start - self.skipped


@dataclass(frozen=True)
class Attempt:
    """One attempt at training. `ended` is None if its end is unknown."""

    started: AttemptStarted
    ended: AttemptEnded | None
    last_time: float
    last_step: int

    @property
    def number(self) -> int:
        return self.started.attempt

    @property
    def start(self) -> float:
        return self.started.time

    @property
    def end(self) -> float:
        return self.ended.time if self.ended else self.last_time

    @property
    def seconds(self) -> float:
        jumped = skipped(self.start, self.end, self.ended.seconds) if self.ended else 0.0
        return self.end - self.start - jumped

    @property
    def first_step(self) -> int:
        return self.started.resumed_from_step or 0

    @property
    def outcome(self) -> str:
        return self.ended.outcome if self.ended else "cut off"


@dataclass(frozen=True)
class RunSummary:
    """The run's state, in one sentence. If the run failed, `failure` says why and how to fix it.

    resubmitted_as: id of the Kubeflow Pipelines run that continues it; "" if there is none.
    """

    state: RunState
    sentence: str
    failure: StepFailed | None = None
    resubmitted_as: str = ""


def without_steps(workspace: Workspace, job: str) -> RunSummary:
    """Return the story of a pipeline run whose steps have written nothing to the run's folder.

    Args:
        job: KFP's id of the run.
    """
    data_check = take_data_check(workspace, job)
    if data_check is None:
        return _before_the_first_step(Facts(workspace))
    if data_check.failure:
        error, message, remedy = (data_check.failure[key] for key in ("error", "message", "remedy"))
        failure = StepFailed(stage="detect-change", error=error, message=message, remedy=remedy)
        return RunSummary("failed", f"{workspace.run_id} failed in {failure.stage}.", failure)
    if data_check.found:
        sentence = f"{workspace.run_id} has not started, although there is something to train on"
        return RunSummary("unfinished", f"{sentence}: {data_check.reason}.")
    sentence = f"Nothing was trained. {data_check.reason[:1].upper()}{data_check.reason[1:]}."
    return RunSummary("unchanged", sentence)


def executions(events: Sequence[Event]) -> list[Execution]:
    """Return every execution of a step, without the report's own, in order of start.

    A killed execution ends with the last event before another step's start, or with the last event.
    """
    result: list[Execution] = []
    running: dict[str, StepStarted] = {}
    cut: dict[str, float] = {}
    last = 0.0
    for event in events:
        if getattr(event, "stage", "") == REPORT_STEP:
            continue
        if isinstance(event, StepStarted):
            for stage in running:
                cut.setdefault(stage, last)
            ends = list(running) if event.stage == FIRST_STEP else [event.stage]
            result += [
                _killed(running.pop(stage), cut.pop(stage)) for stage in ends if stage in running
            ]
            running[event.stage] = event
        elif isinstance(event, StepFinished | StepFailed) and event.stage in running:
            result.append(_execution(running.pop(event.stage), event))
            cut.pop(event.stage, None)
        last = event.time
    result += [_killed(started, cut.get(stage, last)) for stage, started in running.items()]
    return sorted(result, key=lambda item: item.start)


def latest(found: Sequence[Execution]) -> list[Execution]:
    """Return the last execution of each step since the pipeline last started."""
    begins = [index for index, item in enumerate(found) if item.stage == FIRST_STEP]
    session = found[begins[-1] :] if begins else found
    return list({item.stage: item for item in session}.values())


def attempts(facts: Facts) -> list[Attempt]:
    """Return the attempts at training, in order."""
    ended = {event.attempt: event for event in facts.of(AttemptEnded)}
    progress: dict[int, tuple[float, int]] = {}
    for event in facts.events:
        if isinstance(event, TrainingStep | Validated | CheckpointSaved):
            progress[event.attempt] = (event.time, event.step)
    result = []
    for started in facts.of(AttemptStarted):
        time, step = progress.get(started.attempt, (started.time, started.resumed_from_step or 0))
        end = ended.get(started.attempt)
        result.append(Attempt(started, end, time, max(step, end.step) if end else step))
    return result


def outcome(facts: Facts) -> RunSummary:
    """Return the run's state."""
    steps = latest(executions(facts.events))
    name = facts.setting("name") or facts.workspace.run_id
    if not steps:
        return _before_the_first_step(facts)
    last = steps[-1]
    ended, again = _after(facts, last, Terminated), _after(facts, last, Resubmitted)
    # A supervisor that was killed seems to run until its lease expires.
    if facts.running and not ended:
        return _working(facts, last)
    if last.state == "failed" and last.failure and not again:
        return RunSummary("failed", f"{name} failed in {last.stage}.", last.failure)
    if ended:
        stage = f"in {last.stage}{_at_step(facts)}"
        return RunSummary("terminated", f"{name} was terminated {stage}: {ended.how}.")
    if again:
        message = f"It was resubmitted as Kubeflow Pipelines run {again.kfp_run}."
        return RunSummary(
            "resubmitted",
            f"{name} lost {last.stage}{_at_step(facts)}. {message}",
            resubmitted_as=again.kfp_run,
        )
    if last.state == "stopped":
        how = "pruned" if last.failure and last.failure.error == "Pruned" else "stopped"
        return RunSummary("stopped", f"{name} was {how} in {last.stage}{_at_step(facts)}.")
    if last.state == "unfinished":
        return RunSummary(
            "unfinished",
            f"{name} has not finished: {last.stage} is still running, or was "
            f"killed{_at_step(facts)}{_while_waiting(facts)}.",
        )
    if _complete(facts, last.stage):
        return RunSummary("finished", _success(facts, str(name), last))
    return RunSummary("unfinished", f"{name} has not continued after {last.stage}.")


def _killed(started: StepStarted, end: float) -> Execution:
    return Execution(started.stage, "unfinished", started.time, end)


def _execution(started: StepStarted, event: StepFinished | StepFailed) -> Execution:
    times = started.time, event.time, skipped(started.time, event.time, event.seconds)
    if isinstance(event, StepFailed):
        state: StepState = "stopped" if event.on_request else "failed"
        return Execution(started.stage, state, *times, failure=event)
    state = "reused" if event.reused else "finished"
    execution = Execution(started.stage, state, *times, summary=event.summary)
    return replace(execution, reused_from=event.reused_from)


def _complete(facts: Facts, last_stage: str) -> bool:
    if last_stage in ("promote", WINNER_STEP, FOLDS_STEP):
        return True
    if last_stage == TUNE_STEP:
        return bool(facts.setting("tune.seeds") == 0)
    promoted = facts.gate is not None and facts.gate.promoted
    return last_stage == "register" and not promoted


def _before_the_first_step(facts: Facts) -> RunSummary:
    run = facts.workspace.run_id
    if facts.running:
        return RunSummary("running", f"{run} is running: no step has started yet.")
    return RunSummary("empty", f"Run {run} has not started a step.")


def _working(facts: Facts, last: Execution) -> RunSummary:
    """Return the state of a run that a process works on."""
    run = facts.workspace.run_id
    if reason := waits_for(facts):
        return RunSummary("pending", f"{run} waits for the pods of {last.stage}: {reason}.")
    if last.state in ("finished", "reused"):
        return RunSummary("running", f"{run} is running: {last.stage} is done.")
    return RunSummary("running", f"{run} is running: it is in {last.stage}{_progress(facts)}.")


def waits_for(facts: Facts) -> str:
    """Return what the newest attempt's pods wait for; "" if none of them waits."""
    begun, waits = facts.of(AttemptStarted), facts.of(PodsPending)
    if not begun or not waits or waits[-1].attempt != begun[-1].attempt:
        return ""
    ended = any(item.attempt == begun[-1].attempt for item in facts.of(AttemptEnded))
    return "" if ended else waits[-1].reason.rstrip(".")


def _while_waiting(facts: Facts) -> str:
    reason = waits_for(facts)
    return f", while its pods waited: {reason}" if reason else ""


def on_a_cluster(facts: Facts) -> bool:
    """Return whether a pipeline on a cluster worked on the run last."""
    started = facts.of(StepStarted)
    return bool(started and started[-1].pod)


def _after(facts: Facts, last: Execution, kind: type[E]) -> E | None:
    """Return the newest event of a kind, if no step has begun after it.

    A step that is killed may still report something while it ends.
    """
    events = facts.of(kind)
    return events[-1] if events and events[-1].time >= last.start else None


def _at_step(facts: Facts) -> str:
    """Return the last step in words: not each one is an event, and stopping saves a checkpoint."""
    kinds = TrainingStep | Validated | CheckpointSaved | AttemptEnded
    steps = [event.step for event in facts.events if isinstance(event, kinds)]
    return f", at training step {steps[-1]}" if steps else ""


def _progress(facts: Facts) -> str:
    at, planned = _at_step(facts), facts.of(TrainingStarted)
    return f"{at} of {number(planned[-1].max_steps)}" if at and planned else at


def _success(facts: Facts, name: str, last: Execution) -> str:
    if last.stage in (TUNE_STEP, WINNER_STEP):
        return f"{name} is tuned: {last.summary}."
    if last.stage == SEARCH_STEP:
        return f"{name} is searched for: {last.summary}."
    if last.stage == FOLDS_STEP:
        return f"{name} is cross-validated: {last.summary}."
    trained = facts.training
    work = f"{name} is trained"
    if trained:
        work += f": {number(trained.parameters)} parameters, {number(trained.steps)} steps"
    registered = facts.promotion or facts.registration
    if registered is None:
        return f"{work}."
    version = f"version {registered.version} of {registered.model_name}"
    if registered.champion:
        return f"{work}; registered as {version}, the new champion."
    undecided = facts.gate is not None and facts.gate.undecided
    verdict = "undecided: there are too few test examples" if undecided else "not promoted"
    return f"{work}; registered as {version}, {verdict}."


def wall_seconds(executions: Sequence[Execution]) -> float:
    """Return the seconds from the start of the first step to the end of the last."""
    if not executions:
        return 0.0
    jumped = sum(item.skipped for item in executions)
    return max(item.end for item in executions) - executions[0].start - jumped


def phases(executions: Sequence[Execution]) -> list[tuple[str, float]]:
    """Return the seconds of each step, and the time between steps if it exceeds half a second.

    Together they make up the wall time.
    """
    by_step: dict[str, float] = {}
    for item in executions:
        by_step[item.stage] = by_step.get(item.stage, 0.0) + item.seconds
    between = wall_seconds(executions) - sum(by_step.values())
    return [*by_step.items(), *([("between the steps", between)] if between > 0.5 else [])]


def repeated_steps(attempts: Sequence[Attempt]) -> int:
    """Return how many optimizer steps were repeated.

    Steps are repeated if the attempt before ended after its last checkpoint.
    """
    return sum(max(0, before.last_step - after.first_step) for before, after in pairwise(attempts))

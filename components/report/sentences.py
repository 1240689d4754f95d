"""Events in one line each, and a run's story as one line of a log."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import singledispatch
from typing import Any, Final, get_args

from steadytrain.components.report.story import RunState, RunSummary
from steadytrain.components.shared.batch import REPLICATED
from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.events import Event
from steadytrain.components.shared.events.types import (
    Adjusted,
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    DecisionMade,
    GradientOverflow,
    LatencyMeasured,
    ProblemFound,
    Remark,
    Resubmitted,
    StepFailed,
    StepFinished,
    StepStarted,
    TrainingDiverged,
    TrainingStarted,
    Validated,
)
from steadytrain.components.shared.quantities import amount, duration, size


def recovery(ended: AttemptEnded, decided: DecisionMade | None, step: int) -> str:
    """Describe a recovery in one line: what failed, why, and what was decided.

    Args:
        decided: None if the supervisor died and a new one continued.
        step: where training continues; left out if the decision is to stop.
    """
    happened = f"attempt {ended.attempt} {ended.outcome} at step {ended.step:,}"
    happened += f" ({_first_line(ended.message)})" if ended.message else ""
    if decided is None:
        return f"{happened}; a new supervisor continues from step {step:,}"
    action = decided.action.replace("_", " ")
    if decided.action == "stop":
        return f"{happened}; {action}: {_first_line(decided.reason)}"
    return f"{happened}; {action} from step {step:,}: {_first_line(decided.reason)}"


@singledispatch
def describe(event: Event) -> str:  # noqa: ARG001  the fallback has nothing to look at
    """Return the event in one line, or "" for events that are only shown live."""
    return ""


@describe.register
def _(event: StepStarted) -> str:
    return f"{event.stage}: started"


@describe.register
def _(event: StepFinished) -> str:
    state = "reused" if event.reused else "done"
    return f"{event.stage}: {state}" + (f", {event.summary}" if event.summary else "")


@describe.register
def _(event: StepFailed) -> str:
    if event.on_request:
        return f"{event.stage}: {_first_line(event.message)}"
    return f"{event.stage}: failed: {_first_line(event.message)}"


@describe.register
def _(event: AttemptStarted) -> str:
    start = f"from step {event.resumed_from_step:,}" if event.resumed_from_step else "from step 0"
    own = event.batch
    batch = (
        f"{own.micro_batch_size} (micro-batch) x {event.gradient_accumulation_steps} "
        f"(accumulation) x {event.world_size} (world size)"
    )
    if own.gradient_checkpointing:
        batch += ", activation checkpointing"
    if own.strategy != REPLICATED:
        batch += f", {own.strategy}"
    if own.offload != "none":
        batch += f", offload {own.offload}"
    if own.sequence_length:
        batch += f", sequences of at most {own.sequence_length:,} tokens"
    return f"train: attempt {event.attempt} starts {start}, batch {batch}"


@describe.register
def _(event: AttemptEnded) -> str:
    text = (
        f"train: attempt {event.attempt} {event.outcome.replace('_', ' ')} at step {event.step:,}"
    )
    return (
        f"{text} ({event.failure_class}): {_first_line(event.message)}" if event.message else text
    )


@describe.register
def _(event: DecisionMade) -> str:
    return f"train: {event.action.replace('_', ' ')}: {event.reason}"


@describe.register
def _(event: Adjusted) -> str:
    return f"train: adjusted on request: {event.change}"


@describe.register
def _(event: TrainingStarted) -> str:
    return (
        f"train: {amount(event.parameters)} parameters, {event.precision} on {event.device}, "
        f"{event.max_steps:,} steps"
    )


@describe.register
def _(event: LatencyMeasured) -> str:
    return (
        f"train: one sequence of {event.sequence_length:,} tokens takes "
        f"{event.milliseconds:.3g} ms on {event.device}"
    )


@describe.register
def _(event: Validated) -> str:
    metrics = ", ".join(f"{name} {value:.4f}" for name, value in event.metrics.items())
    return f"train: step {event.step:,} validated, {metrics}" + (" (best)" if event.best else "")


@describe.register
def _(event: CheckpointSaved) -> str:
    return (
        f"train: step {event.step:,} checkpoint saved, {size(event.bytes)} "
        f"in {duration(event.seconds)}"
    )


@describe.register
def _(event: TrainingDiverged) -> str:
    return f"train: diverged at step {event.step:,}, loss {event.loss}"


@describe.register
def _(event: GradientOverflow) -> str:
    if event.scale is not None:
        return f"train: step {event.step:,} skipped, gradients overflowed at scale {event.scale:g}"
    return (
        f"train: step {event.step:,}: training.max_grad_norm clipped the gradients of "
        f"{event.clipped or 0:.0%} of the last {event.steps} steps"
    )


@describe.register
def _(event: Remark) -> str:
    return f"{event.stage}: {event.message}"


@describe.register
def _(event: ProblemFound) -> str:
    return f"train: {event.rule.replace('_', ' ')}: {event.evidence}"


@describe.register
def _(event: Resubmitted) -> str:
    return (
        f"a step was lost; resubmitted as run {event.kfp_run}, {event.number} of at most "
        f"{event.limit} in a row without a new checkpoint"
    )


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


_MARK: Final = "steadytrain story: "
_FAILURE: Final = ("stage", "error", "message", "remedy")


def as_line(run_summary: RunSummary) -> str:
    """Return a story as one line."""
    content = asdict(run_summary)
    if run_summary.failure:
        failure = run_summary.failure.as_plain()
        content["failure"] = {name: redact(text) for name, text in failure.items()}
    return f"{_MARK}{json.dumps(content)}"


def from_log(log: str) -> RunSummary | None:
    """Return the last story in a log; None if there is none."""
    lines = [line.partition(_MARK)[2] for line in log.splitlines() if _MARK in line]
    return _parsed(lines[-1]) if lines else None


def _parsed(line: str) -> RunSummary | None:
    """Return the story in a line; None if the line is damaged."""
    try:
        content: Any = json.loads(line)
        failure = None
        if content["failure"]:
            stage, error, message, remedy = (str(content["failure"][name]) for name in _FAILURE)
            failure = StepFailed(stage=stage, error=error, message=message, remedy=remedy)
        state, sentence, again = (content[key] for key in ("state", "sentence", "resubmitted_as"))
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if state not in get_args(RunState):
        return None
    return RunSummary(state, str(sentence), failure, str(again))

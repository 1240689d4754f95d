"""Render the report as one HTML page: arrange the facts for the template."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from steadytrain.components.observe.diagnosis import findings
from steadytrain.components.pages.data_section import DataCard, data_section
from steadytrain.components.pages.evaluation_section import evaluation_section, gate_section
from steadytrain.components.pages.html import html
from steadytrain.components.report.facts import Facts, Spending
from steadytrain.components.report.figures import (
    layer_rows,
    timeline,
    training_figures,
    validation_rows,
)
from steadytrain.components.report.story import (
    Attempt,
    Execution,
    attempts,
    executions,
    latest,
    outcome,
    phases,
    repeated_steps,
    wall_seconds,
)
from steadytrain.components.shared.config import TrainingConfig
from steadytrain.components.shared.events.types import (
    Remark,
    StepStarted,
    TrainingStarted,
    TrainingStep,
)
from steadytrain.components.shared.quantities import duration, moment, number, percent
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.shared.tracking.notes import RUN, recall
from steadytrain.components.techniques.mixture import Drawn, MixtureConfig
from steadytrain.components.train.recovery.history import History

_LABELS = {
    "running": "Running",
    "pending": "Waiting for pods",
    "terminated": "Terminated",
    "unchanged": "Nothing new",
    "finished": "Finished",
    "failed": "Failed",
    "stopped": "Stopped",
    "unfinished": "Not finished",
    "resubmitted": "Submitted again",
    "empty": "Not started",
}


def render(facts: Facts) -> str:
    """Return the page as HTML."""
    return html("report", **content(facts))


def content(facts: Facts) -> dict[str, Any]:
    """Return everything that the page shows, by the names that its template uses."""
    ran = executions(facts.events)
    tried = attempts(facts)
    run_summary, spending = outcome(facts), Spending.of(facts)
    metrics, validations = validation_rows(facts)
    return {
        "name": facts.setting("name") or facts.workspace.run_id,
        "run_id": facts.workspace.run_id,
        "folder": str(facts.workspace.folder),
        "outcome": run_summary,
        "outcome_label": _LABELS[run_summary.state],
        # Promotion comes first: it may have met a different champion than the gate.
        "verdict": decided.reason if (decided := facts.promotion or facts.gate) else "",
        "tiles": _tiles(facts, ran, spending, finished=run_summary.state == "finished"),
        "steps": latest(ran),
        "data": _data(facts),
        "figures": training_figures(facts),
        "layers": layer_rows(facts),
        "validation_metrics": metrics,
        "validations": validations,
        "problems": findings(facts.events, facts.workspace.arguments),
        "decided": [(item.field, [item.text, item.reason]) for item in facts.history.decided],
        "attempts": _attempt_rows(tried, facts.history),
        "repeated": repeated_steps(tried),
        "timeline": timeline(facts.history.attempts, facts.spans),
        "spending": spending,
        "evaluation": evaluation_section(facts.evaluation) if facts.evaluation else None,
        "gate": gate_section(facts.gate) if facts.gate else None,
        "phases": [
            (name, [duration(seconds), percent(seconds / (wall_seconds(ran) or 1.0))], seconds)
            for name, seconds in phases(ran)
        ],
        "wall": wall_seconds(ran),
        "warnings": Counter(
            (event.stage, event.message) for event in facts.events if isinstance(event, Remark)
        ).items(),
        "environment": _environment(facts),
        "config_text": facts.config_text,
        "unreadable": [*facts.unreadable, *facts.left_out],
    }


def _tiles(
    facts: Facts, ran: Sequence[Execution], spending: Spending, *, finished: bool
) -> list[tuple[str, str, str]]:
    """Return the figures to read first: name, value, note.

    The version and the test score are shown only if the run has finished. Otherwise, these records
    may be from before the run was resumed.
    """
    tiles: list[tuple[str, str, str]] = []
    registered = facts.promotion or facts.registration
    if finished and registered:
        note = "champion" if registered.champion else "candidate"
        tiles.append(("Version", registered.version, f"{registered.model_name}, {note}"))
    if finished and facts.gate:
        note = "none before"
        if facts.gate.champion is not None:
            note = f"champion's: {number(facts.gate.champion)}"
        tiles.append((f"Test {facts.gate.metric}", number(facts.gate.candidate), note))
    if facts.training:
        trained = facts.training
        what, note = f"Best {trained.metric}", f"validation, at step {number(trained.best_step)}"
        if not trained.validated:
            what, note = "Training loss", "of the last step; nothing was validated"
        tiles.append((what, number(trained.best_score), note))
        tiles.append(("Steps", number(trained.steps), f"{number(trained.parameters)} parameters"))
        attempt_note = "attempt" if trained.attempts == 1 else "attempts"
        tiles.append(("Training", duration(trained.seconds), f"{trained.attempts} {attempt_note}"))
    elif steps := facts.of(TrainingStep):
        planned = facts.of(TrainingStarted)
        note = f"of {number(planned[-1].max_steps)}" if planned else ""
        tiles.append(("Last step", number(steps[-1].step), note))
        tiles.append(("Last loss", number(steps[-1].loss), "training"))
    newest = {event.attempt: event for event in facts.of(TrainingStep)}
    if clipped := sum(event.clipped_steps for event in newest.values()):
        begun = {item.number: item.first_step for item in attempts(facts)}
        ended = sum(event.step - begun.get(event.attempt, 0) for event in newest.values())
        note = f"{number(clipped)} of {number(ended)}, by training.max_grad_norm"
        tiles.append(("Clipped steps", percent(clipped / ended), note))
    if spending.times.wall:
        tiles.append(("Goodput", percent(spending.times.goodput), "useful share of training"))
    if ran:
        tiles.append(("All steps", duration(wall_seconds(ran)), f"since {moment(ran[0].start)}"))
    return tiles


def _attempt_rows(tried: Sequence[Attempt], history: History) -> list[tuple[Attempt, str]]:
    """Return attempts, each with what a person changed, and what was decided, or else the fix.

    After the decision to stop, show both.
    """
    rows = []
    for attempt in tried:
        remedy = attempt.ended.remedy if attempt.ended else ""
        decided = [item for item in history.decisions if item.attempt == attempt.number]
        changed = (item for item in history.adjusted if item.attempt == attempt.number)
        lines = [f"adjusted on request: {item.change}" for item in changed]
        lines += [f"{item.action.replace('_', ' ')}: {item.reason}" for item in decided]
        if all(item.in_place or item.action == "stop" for item in decided):
            lines.append(remedy)
        rows.append((attempt, "\n".join(filter(None, lines))))
    return rows


def _data(facts: Facts) -> dict[str, Any] | None:
    """Return what is known about the data; None means that there is no data record yet."""
    if facts.data is None:
        return None
    try:
        card = DataCard.model_validate(facts.card or {})
    except ValidationError as error:
        facts.unreadable.append(f"card.json: {error.error_count()} fields are not as expected")
        card = DataCard()
    return data_section(facts.data, card, most_labels=25, drawn=_drawn(facts, facts.data))


def _drawn(facts: Facts, data: DataRecord) -> list[Drawn]:
    """Return what training drew of each data set of a mixture; nothing before it or without one."""
    sides, ran = data.sides, facts.of(TrainingStep)
    steps = facts.training.steps if facts.training else ran[-1].step if ran else 0
    if not steps or not sides["train"].sources:
        return []
    # It imports numpy, which a page without a mixture does not need.
    from steadytrain.components.techniques.mixture.plan import MixturePlan

    given = MixtureConfig.model_validate(facts.setting("training.mixture") or {})
    batch = facts.setting("training.global_batch_size") or TrainingConfig().global_batch_size
    return MixturePlan(sides["train"].sources, given).drawn(steps * batch)


def _environment(facts: Facts) -> list[tuple[str, list[str]]]:
    """Return the environment of training, or else of the newest step that reported one.

    Also list the device and precision of training, whether the base model's code is trusted, and
    the MLflow run.
    """
    started = [event for event in facts.of(StepStarted) if event.environment]
    trained = [event for event in started if event.stage == "train"]
    rows = list((trained or started)[-1].environment.items()) if started else []
    devices = facts.of(TrainingStarted)
    if devices:
        rows += [("device", devices[-1].device), ("precision", devices[-1].precision)]
    if rows:
        rows.append(("code beside the model", _remote_code(facts)))
    if facts.nccl:
        rows.append(("NCCL", str(facts.nccl)))
    tracked = recall(facts.workspace, RUN)
    if tracked:
        rows.append(("MLflow run", tracked))
    return [(name, [value]) for name, value in rows]


def _remote_code(facts: Facts) -> str:
    """Say whether the base model's own Python code may run, and which revision pins it."""
    if facts.setting("model.trust_remote_code") is not True:
        return "not trusted: no code runs (model.trust_remote_code: false)"
    base, revision = facts.setting("model.base"), facts.setting("model.revision")
    return f"trusted: the code of {base}, pinned by model.revision {revision}"

"""Several runs side by side: their results, and how their configurations differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from steadytrain.components.report.facts import Facts, Spending
from steadytrain.components.report.figures import memory
from steadytrain.components.report.story import attempts
from steadytrain.components.shared.events.types import (
    AttemptStarted,
    StepStarted,
    TrainingStarted,
    TrainingStep,
    Validated,
    newest_attempt,
)
from steadytrain.components.shared.quantities import duration, number, percent, size

_OF_EVERY_RUN: Final = {"run", "output"}
"""Fields that always differ, and say nothing."""


Row = tuple[str, Sequence[str]]
"""A name and its value in each run."""


def results(facts: Sequence[Facts], states: Sequence[str]) -> list[Row]:
    """Return what each run has reached; "" stands for what is unknown.

    Args:
        states: the state of each run.
    """
    columns = [
        {"State": state, **dict(_results(item))} for item, state in zip(facts, states, strict=True)
    ]
    names = dict.fromkeys(name for column in columns for name in column)
    return [(name, [column.get(name, "") for column in columns]) for name in names]


def differences(facts: Sequence[Facts]) -> list[Row]:
    """Return the fields of the configuration that are not the same in all runs."""
    flat = [
        {name: text for name, text in leaves(item.config) if name not in _OF_EVERY_RUN}
        for item in facts
    ]
    return differing(flat)


def differing(runs: Sequence[Mapping[str, str]]) -> list[Row]:
    """Return rows of a name and its value in each run, without those that are the same."""
    names = sorted({name for fields in runs for name in fields})
    rows: list[Row] = [(name, [fields.get(name, "(not set)") for fields in runs]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def leaves(content: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Yield each field by its dotted name, with its value as text."""
    for name, value in content.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value if isinstance(value, str) else _text(value)


def _text(value: Any) -> str:
    try:
        return json.dumps(value)
    except ValueError:
        return "a number that is too long to show"


def tokens(facts: Facts) -> int:
    """Return how many tokens all attempts have processed, including those of repeated steps."""
    return sum({event.attempt: event.tokens for event in facts.of(TrainingStep)}.values())


def _name(facts: Facts) -> str:
    return facts.workspace.run_id


def _results(facts: Facts) -> Iterator[tuple[str, str]]:
    if steps := facts.of(TrainingStep):
        yield "Step", number(steps[-1].step)
        yield "Training loss", number(steps[-1].loss)
        yield "Tokens", number(tokens(facts))
        yield "Tokens per second", number(round(steps[-1].tokens_per_second))
        yield "Memory of rank 0", size(memory(steps[-1]))
    if scores := facts.of(Validated):
        best = next((event for event in reversed(scores) if event.best), scores[-1])
        for name, score in best.metrics.items():
            yield f"Best validation: {name}", number(score)
    if facts.evaluation:
        for name, metric in facts.evaluation.metrics.items():
            yield f"Test {name}", number(metric.value)
    if tried := attempts(facts):
        yield "Attempts", number(len(tried))
    spending = Spending.of(facts)
    if spending.times.wall:
        yield "Training time", duration(spending.times.wall)
        yield "Goodput", percent(spending.times.goodput)
    if spending.price_per_hour is not None:
        yield "Cost", f"{spending.times.cost(spending.price_per_hour):,.2f} USD"


Origin = Mapping[str, Mapping[str, str]]
"""By section, then by name."""
SECTIONS: Final = ("data", "code", "environment", "hardware")


def origin_differences(facts: Sequence[Facts]) -> dict[str, list[Row]]:
    """Return what differs in each section, as rows of a name and its value in each run."""
    found = [origin(item) for item in facts]
    return {name: differing([item[name] for item in found]) for name in SECTIONS}


def unrecorded(facts: Facts) -> list[str]:
    """Return the sections that the run's folder says nothing about."""
    found = origin(facts)
    return [name for name in SECTIONS if not found[name]]


def origin(facts: Facts) -> Origin:
    """Return what the newest attempt was made from."""
    return dict(
        zip(SECTIONS, (_data(facts), _code(facts), _packages(facts), _hardware(facts)), strict=True)
    )


def _data(facts: Facts) -> dict[str, str]:
    data = facts.data
    if data is None:
        return {}
    about = {
        "fingerprint": data.fingerprint,
        "input": data.inputs_digest,
        "split": data.split_digest,
        "task": data.task,
        "labels": ", ".join(data.labels),
        **{
            f"{name} {what}": f"{getattr(side, what):,}"
            for name, side in sorted(data.sides.items())
            for what in ("documents", "tokens")
        },
    }
    return {name: value for name, value in about.items() if value}


def _code(facts: Facts) -> dict[str, str]:
    """Return the digest of steadytrain's code, and where the user's own code comes from."""
    found = {"steadytrain": _versions(facts).get("code", "")}
    attempts = facts.of(AttemptStarted)
    found |= attempts[-1].code if attempts else {}
    return {name.rpartition("steadytrain.")[2]: value for name, value in found.items() if value}


def _packages(facts: Facts) -> dict[str, str]:
    """Return versions: of the train step's process, and those of its ranks, which win."""
    found = {name: value for name, value in _versions(facts).items() if name != "code"}
    ranks = [event.environment for event in facts.of(TrainingStarted) if event.environment]
    return found | (ranks[-1] if ranks else {})


def _versions(facts: Facts) -> dict[str, str]:
    started = [event for event in facts.of(StepStarted) if event.environment]
    trained = [event for event in started if event.stage == "train"]
    return (trained or started)[-1].environment if started else {}


def _hardware(facts: Facts) -> dict[str, str]:
    """Return the devices of the newest attempt and how the work was divided among them."""
    newest, started = newest_attempt(facts.events), facts.of(TrainingStarted)
    found: dict[str, str] = {}
    if started:
        found |= {"device": started[-1].device, "precision": started[-1].precision}
    if newest is not None:
        batch = newest.batch.micro_batch_size, newest.gradient_accumulation_steps, newest.world_size
        found |= {
            "nodes": str(newest.nodes),
            "micro-batch x accumulation x world size": " x ".join(map(str, batch)),
        }
    return found

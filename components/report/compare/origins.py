"""What a run was made from, as far as its folder says: data, code, environment, hardware."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from steadytrain.components.report.compare.side_by_side import Row, differing
from steadytrain.components.report.facts import Facts
from steadytrain.components.shared.events.types import (
    AttemptStarted,
    StepStarted,
    TrainingStarted,
)

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
    attempts, started = facts.of(AttemptStarted), facts.of(TrainingStarted)
    found: dict[str, str] = {}
    if started:
        found |= {"device": started[-1].device, "precision": started[-1].precision}
    if attempts:
        newest = attempts[-1]
        batch = newest.batch.micro_batch_size, newest.gradient_accumulation_steps, newest.world_size
        found |= {
            "nodes": str(newest.nodes),
            "micro-batch x accumulation x world size": " x ".join(map(str, batch)),
        }
    return found

"""The problems of a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from steadytrain.components.observe.diagnosis.course import Course
from steadytrain.components.observe.diagnosis.rules import RULES
from steadytrain.components.shared.events import Event
from steadytrain.components.shared.events.types import ProblemFound


@dataclass(frozen=True)
class Finding:
    """A problem of a run.

    rule: name of the rule that found it.
    step: the newest step when it was found; 0 before training.
    meaning: what is wrong.
    evidence: what was measured.
    remedy: what to do.
    source: paper or documentation that the rule follows.
    """

    rule: str
    step: int
    meaning: str
    evidence: str
    remedy: str
    source: str

    def __str__(self) -> str:
        """Return the finding in one line."""
        return f"{self.rule.replace('_', ' ')}: {self.evidence}; {self.remedy}"


def findings(events: Iterable[Event]) -> list[Finding]:
    """Return the problems of a run: those reported in its events, and those it has now."""
    course = Course.of(events)
    found = {**course.found, **{event.rule: event for event in new_problems(course)}}
    return [
        Finding(
            rule.name,
            found[name].step,
            rule.meaning,
            found[name].evidence,
            rule.remedy,
            rule.source,
        )
        for name, rule in RULES.items()
        if name in found
    ]


def new_problems(course: Course) -> list[ProblemFound]:
    """Return the problems in a course that were not reported before."""
    last = course.steps[-1] if course.steps else None
    attempt, step = (last.attempt, last.step) if last else (0, 0)
    checked = (
        (rule, rule.check(course)) for rule in RULES.values() if rule.name not in course.found
    )
    return [
        ProblemFound(
            attempt=attempt, step=step, rule=rule.name, evidence=evidence, remedy=rule.remedy
        )
        for rule, evidence in checked
        if evidence
    ]

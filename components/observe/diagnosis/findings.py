"""Every rule of the diagnosis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from steadytrain.components.observe.background import Background
from steadytrain.components.observe.diagnosis.learning import LEARNING
from steadytrain.components.observe.diagnosis.resources import RESOURCES, SPEED
from steadytrain.components.observe.diagnosis.rule import ObservedRun, Rule
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.events import Cursor, Event
from steadytrain.components.shared.events.types import ProblemFound
from steadytrain.components.shared.workspace import Workspace

RULES: Final[Mapping[str, Rule]] = {rule.name: rule for rule in (*LEARNING, *SPEED, *RESOURCES)}
"""By name, in display order."""


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


def findings(events: Iterable[Event], name: str = "") -> list[Finding]:
    """Return the problems of a run: those reported in its events, and those it has now.

    Args:
        name: of the run; "" if a person cannot adjust it.
    """
    run = ObservedRun.of(events, name)
    found = {**run.found, **{event.rule: event for event in new_problems(run)}}
    return [
        Finding(
            rule.name,
            found[name].step,
            rule.meaning,
            found[name].evidence,
            found[name].remedy,
            rule.source,
        )
        for name, rule in RULES.items()
        if name in found
    ]


def new_problems(run: ObservedRun) -> list[ProblemFound]:
    """Return the problems in a run that were not reported before."""
    last = run.steps[-1] if run.steps else None
    attempt, step = (last.attempt, last.step) if last else (0, 0)
    checked = ((rule, rule.check(run)) for rule in RULES.values() if rule.name not in run.found)
    return [
        ProblemFound(
            attempt=attempt, step=step, rule=rule.name, evidence=evidence, remedy=rule.advice(run)
        )
        for rule, evidence in checked
        if evidence
    ]


EVERY_SECONDS = 5.0


class DiagnosisSink(Background):
    """Looks for problems every few seconds while a run trains.

    It reads the run's events from their start, with the problems that are reported already. So the
    next supervisor reports none of them again.
    """

    def __init__(
        self, config: RunConfig, workspace: Workspace, *, every: float = EVERY_SECONDS
    ) -> None:
        del config
        self._run, self._cursor = ObservedRun(workspace.run_id), Cursor(workspace.events)
        super().__init__("diagnosis", workspace, every=every)

    def work(self) -> None:
        """Read the new events, and report the problems that are new."""
        for item in self._cursor.read():
            self._run.add(item.event)
        if self._cursor.ack() and (problems := new_problems(self._run)):
            for problem in problems:
                # Its own file is read in the next round.
                self._run.add(problem)
            self.add_events(*problems)

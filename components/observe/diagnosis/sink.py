"""The diagnosis as a sink: reports each problem of a run as an event, once."""

from __future__ import annotations

from steadytrain.components.observe.background import Background
from steadytrain.components.observe.diagnosis.course import Course
from steadytrain.components.observe.diagnosis.findings import new_problems
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.events import Cursor
from steadytrain.components.shared.workspace import Workspace

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
        self._course, self._cursor = Course(), Cursor(workspace.events)
        super().__init__("diagnosis", workspace, every=every)

    def work(self) -> None:
        """Read the new events, and report the problems that are new."""
        for item in self._cursor.read():
            self._course.add(item.event)
        if self._cursor.ack() and (problems := new_problems(self._course)):
            for problem in problems:
                # Its own file is read in the next round.
                self._course.add(problem)
            self.tell(*problems)

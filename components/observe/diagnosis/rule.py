"""What a rule of the diagnosis is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from steadytrain.components.observe.diagnosis.course import Course


@dataclass(frozen=True)
class Rule:
    """One problem that the diagnosis looks for.

    check: returns the evidence in a course, as a clause with numbers; "" if there is no problem or
        the events do not show it.
    meaning: what is wrong.
    remedy: what to do.
    source: paper or documentation that the rule follows.
    """

    name: str
    check: Callable[[Course], str]
    meaning: str
    remedy: str
    source: str

"""Every rule of the diagnosis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from steadytrain.components.observe.diagnosis.learning import LEARNING
from steadytrain.components.observe.diagnosis.resources import RESOURCES
from steadytrain.components.observe.diagnosis.rule import Rule
from steadytrain.components.observe.diagnosis.speed import SPEED

RULES: Final[Mapping[str, Rule]] = {rule.name: rule for rule in (*LEARNING, *SPEED, *RESOURCES)}
"""By name, in display order."""

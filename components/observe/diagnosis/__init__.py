"""Rules that find problems of a training run in its events."""

from steadytrain.components.observe.diagnosis.findings import Finding, findings
from steadytrain.components.observe.diagnosis.rules import RULES

__all__ = ["RULES", "Finding", "findings"]

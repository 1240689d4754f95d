"""Rules that find problems of a training run in its events."""

from steadytrain.components.observe.diagnosis.findings import RULES, Finding, findings

__all__ = ["RULES", "Finding", "findings"]

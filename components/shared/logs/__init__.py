"""A run's events as log lines for people and for log collectors."""

from steadytrain.components.shared.logs.follow import following
from steadytrain.components.shared.logs.lines import Log

__all__ = ["Log", "following"]

"""How long ranks wait for each other."""

from __future__ import annotations

from typing import Final

from steadytrain.components.shared.config import RecoveryConfig

OTHER_RANKS_SECONDS: Final = 900.0
"""How long a rank that waits for the others' parts of a save shows signs of life."""
_SLACK_SECONDS: Final = 300.0
"""Time to find a hang, to save the stacks, and to end the ranks."""


def longest_wait(recovery: RecoveryConfig) -> float:
    """Return the seconds after which a collective may fail by itself.

    A rank that does not come is found before that by its heartbeat, and reported with its stacks.
    """
    limit = max(recovery.start_timeout_seconds, recovery.hang_timeout_seconds)
    return OTHER_RANKS_SECONDS + limit + _SLACK_SECONDS

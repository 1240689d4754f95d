"""What the supervisor asks of a launcher, on this machine or elsewhere."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from steadytrain.components.train.attempt import AttemptFolder


class AgentHandle(Protocol):
    """What a launcher knows of the agent that it has started; the rest is in the folder."""

    def gone(self) -> bool:
        """Whether it is known to have ended."""


class Launcher(Protocol):
    """Starts attempts."""

    @property
    def world_size(self) -> int:
        """Ranks that each attempt has."""

    def start(self, folder: AttemptFolder) -> AbstractContextManager[AgentHandle]:
        """Starts an agent on what the attempt's folder specifies.

        However the context is left, no process of the attempt is left behind.
        """

"""What the supervisor asks of a launcher, on this machine or elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from steadytrain.components.train.attempt import AttemptFolder


class RunningAttempt(Protocol):
    """The ranks of one attempt."""

    def poll(self) -> bool:
        """Whether all are down, or lost for good; the attempt's folder then says why."""

    def stop(self, grace_seconds: float) -> None:
        """Asks every rank to leave (SIGTERM, and SIGKILL after the grace); returns at once.

        Called again with a shorter grace, it shortens the first.
        """

    def exits(self) -> Mapping[int, int]:
        """Exit status by rank (negative: a signal), the earliest failure first.

        Ranks that ended well may be missing; empty where nobody is left to tell.
        """


class Launcher(Protocol):
    """Starts attempts."""

    @property
    def world_size(self) -> int:
        """Ranks that each attempt has."""

    @property
    def device(self) -> str:
        """What they compute on: the name of a GPU, or "cpu"."""

    @property
    def host_memory(self) -> int:
        """Bytes of a node's own memory that its ranks may have."""

    def start(self, folder: AttemptFolder) -> AbstractContextManager[RunningAttempt]:
        """Starts the ranks on what the attempt's folder specifies.

        However the context is left, no process of the attempt is left behind.
        """

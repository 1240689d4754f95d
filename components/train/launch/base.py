"""The interface between the supervisor and a launcher, local or remote."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from steadytrain.components.train.attempt import AttemptFolder


class RunningAttempt(Protocol):
    """The ranks of one attempt."""

    def poll(self) -> bool:
        """Return whether all ranks have exited or are lost; then the attempt's folder says why."""

    def stop(self, grace_seconds: float) -> None:
        """Ask every rank to exit (SIGTERM, then SIGKILL after the grace period); return at once.

        A later call with a shorter grace period shortens the first one.
        """

    def exits(self) -> Mapping[int, int]:
        """Return the exit status by rank (negative: a signal), the earliest failure first.

        Successful ranks may be missing. Empty if nothing is left to report.
        """


class Launcher(Protocol):
    """Starts attempts."""

    @property
    def world_size(self) -> int:
        """The number of ranks in each attempt."""

    @property
    def device(self) -> str:
        """The device that they compute on: the name of a GPU, or "cpu"."""

    @property
    def host_memory(self) -> int:
        """Bytes of host memory that the ranks of one node may use."""

    def start(self, folder: AttemptFolder) -> AbstractContextManager[RunningAttempt]:
        """Start the ranks specified in the attempt's folder.

        However the context exits, no process of the attempt remains.
        """

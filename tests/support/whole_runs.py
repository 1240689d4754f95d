"""Training runs from start to end under the supervisor, undisturbed or killed once."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from steadytrain.components.shared.events.types import CheckpointSaved
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.shared.workspace import Workspace

from support.forked import ForkedLauncher, train
from support.pause import Pause
from support.training import Bench

RECIPE = {
    "max_steps": 12,
    "global_batch_size": 4,
    "micro_batch_size": 2,
    "learning_rate": 5e-3,
    "eval_steps": 4,
    "save_steps": 4,
    "logging_steps": 1,
}


class KillsOnce:
    """Kills a rank at the run's first checkpoint from a step on, before there is a second one.

    Args:
        rank: -1 is the last one.
    """

    kind = "CheckpointSaved"

    def __init__(self, launcher: ForkedLauncher, *, step: int = 0, rank: int = 0) -> None:
        self.launcher, self.step, self.done = launcher, step, False
        self.rank = rank % launcher.world_size
        self.pause = Pause(Path(tempfile.mkdtemp(), "pause"), step, self.kind)
        launcher.environment |= self.pause.environment

    def emit(self, event: Any) -> None:
        if isinstance(event, CheckpointSaved) and event.step >= self.step and not self.done:
            self.kill()

    def kill(self) -> None:
        self.done = True
        self.launcher.kill(self.rank)
        self.pause.set(None)

    def close(self) -> None:
        pass


def run(
    folder: Path,
    data: DataRecord,
    sections: dict[str, Any],
    *,
    killed: bool | Callable[[ForkedLauncher], Any] = False,
    ranks: int = 1,
    strategy: str = "auto",
) -> Workspace:
    """Train to the end; fail if the run does not finish.

    Args:
        sections: of the configuration.
        killed: whether to kill the run once, or the sink that does it.
    """
    bench = Bench.make(
        folder,
        data,
        **sections,
        compute={
            "device": "cpu",
            "nproc_per_node": ranks,
            "threads_per_rank": 1,
            "strategy": strategy,
        },
        recovery={"backoff_seconds": 0, "breaker_reset_seconds": 0},
    )
    launcher = ForkedLauncher(ranks)
    kills = KillsOnce if killed is True else killed
    outcome = train(bench, launcher=launcher, sinks=[kills(launcher)] if kills else [])
    assert (outcome.outcome, outcome.attempts) == ("finished", 1 + bool(kills)), outcome
    return bench.workspace

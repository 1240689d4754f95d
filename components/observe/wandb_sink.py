"""Weights & Biases as a sink of the event stream: one run of theirs for each attempt.

Without a key it works offline: each attempt is written when it has ended, whole or not at all, and
`wandb sync` uploads it. With a key the points go out while training runs. Each has a number that
follows from its event, and Weights & Biases ignores a number that it already has.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, Unpack, cast

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.errors import TrackingError
from steadytrain.components.shared.events import Cursor, Event
from steadytrain.components.shared.events.points import Histogram, Shown, shown_at
from steadytrain.components.shared.events.types import (
    AttemptEnded,
    LayersCounted,
    NoiseScaleMeasured,
    TrainingStep,
    Validated,
)
from steadytrain.components.shared.tracking.batches import flatten
from steadytrain.components.shared.tracking.notes import Spool, by_attempt, identity
from steadytrain.components.shared.tracking.pull_sink import PullSink, SinkTiming, check_package
from steadytrain.components.shared.workspace import Workspace

FOLDER: Final = "wandb"
"""In the run's folder. `wandb sync <output>/runs/<run>/wandb/*/wandb/*-run-*` uploads it."""

_Tracked = Shown | AttemptEnded
_ORDER = (LayersCounted, NoiseScaleMeasured, TrainingStep, Validated)
"""Events with points, as they follow each other at a step."""

_FINISHED = ("finished", "early_stopped", "pruned")


class WandbDelivery:
    """Sends a run's points to Weights & Biases, or writes them for it."""

    def __init__(self, config: RunConfig, workspace: Workspace) -> None:
        self.config, self.workspace = config, workspace
        self.folder = workspace.folder / FOLDER
        self.mode = os.environ.get("WANDB_MODE") or (
            "online" if os.environ.get("WANDB_API_KEY") else "offline"
        )
        self.spool = Spool(workspace, FOLDER)
        self._open: dict[int, Any] = {}

    def catch_up(self, *, give_up: Callable[[], bool] = lambda: False) -> None:
        """Send what is missing. Stop if `give_up` returns true before a batch.

        Raises:
            TrackingError: Weights & Biases does not accept it, or it cannot be written.
        """
        online = self.mode == "online"
        while not give_up():
            with self.spool.batch(_is_tracked if online else _is_end) as events, _errors():
                if not events:
                    break
                for attempt, group in by_attempt(cast(Iterable[_Tracked], events)):
                    if online:
                        self._send(attempt, group)
                    else:
                        self._write(attempt)

    def close(self) -> None:
        """Wait until Weights & Biases has what was sent. An attempt may still be running."""
        while self._open:
            self._open.popitem()[1].finish()

    def _send(self, attempt: int, events: Iterable[_Tracked]) -> None:
        if attempt not in self._open:
            self.folder.mkdir(exist_ok=True)
            self._open[attempt] = self._run(attempt, self.folder)
        if _log(self._open[attempt], events):
            del self._open[attempt]

    def _write(self, attempt: int) -> None:
        """Write an attempt that has ended, unless an earlier process wrote it."""
        target, partial = self.folder / f"attempt-{attempt}", self.folder / f".attempt-{attempt}"
        if target.exists():
            return
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        run = self._run(attempt, partial)
        if not _log(run, self._events_of(attempt)):
            run.finish()
        partial.rename(target)

    def _events_of(self, attempt: int) -> Iterator[_Tracked]:
        for item in Cursor(self.workspace.events).read():
            if isinstance(item.event, _Tracked) and item.event.attempt == attempt:
                yield item.event

    def _run(self, attempt: int, folder: Path) -> Any:
        import wandb

        # Nothing of this process: its output, its code and its environment may hold secrets.
        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            x_disable_meta=True,
            x_disable_stats=True,
        )
        run = wandb.init(
            mode=cast(Any, self.mode),
            dir=str(folder),
            id=f"{identity(self.workspace)}-{attempt}",
            resume="allow" if self.mode == "online" else None,
            reinit="create_new",
            name=f"{self.config.run_id}-attempt-{attempt}",
            group=self.config.run_id,
            project=os.environ.get("WANDB_PROJECT") or self.config.tracking.experiment,
            config=dict(flatten(self.config.model_dump(mode="json"))),
            settings=settings,
        )
        run.define_metric("*", step_metric="step")
        return run


class WandbSink(PullSink):
    """Sends training events to Weights & Biases, including those that an earlier sink did not send.

    Raises:
        BadInput: wandb is not installed.
    """

    def __init__(
        self, config: RunConfig, workspace: Workspace, **timing: Unpack[SinkTiming]
    ) -> None:
        check_package("wandb")
        delivery = WandbDelivery(config, workspace)
        super().__init__(
            "wandb",
            workspace,
            lambda: delivery,
            around=lambda: contextlib.closing(delivery),
            **timing,
        )


def _log(run: Any, events: Iterable[_Tracked]) -> bool:
    """Log events of an attempt in their order. Return whether the attempt has ended."""
    for event in events:
        if isinstance(event, AttemptEnded):
            run.summary["outcome"] = event.outcome
            if event.failure_class:
                run.summary["failure_class"] = event.failure_class
                run.summary["message"] = redact(event.message)
            run.finish(exit_code=0 if event.outcome in _FINISHED else 1)
            return True
        # Their numbers must increase, and a step can have one event of each type.
        number = len(_ORDER) * event.step + _ORDER.index(type(event))
        values = {name: _value(shown) for name, shown in shown_at(event)}
        run.log({**values, "step": event.step}, step=number)
    return False


def _value(shown: float | Histogram) -> Any:
    if not isinstance(shown, Histogram):
        return shown
    import numpy as np
    import wandb

    return wandb.Histogram(np_histogram=(np.array(shown.counts), np.array(shown.edges)))


def _is_end(event: Event) -> bool:
    return isinstance(event, AttemptEnded)


def _is_tracked(event: Event) -> bool:
    return isinstance(event, _Tracked)


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise TrackingError(
            f"Weights & Biases cannot be used: {redact(str(error))}",
            remedy="fix WANDB_API_KEY or WANDB_BASE_URL, or set WANDB_MODE=offline",
        ) from None  # the original error may contain the key

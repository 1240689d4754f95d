"""Show a run's progress: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn
from rich.progress import Progress as Bars
from rich.text import Text

from steadytrain.components.report.sentences import describe, recovery
from steadytrain.components.shared.events import Event
from steadytrain.components.shared.events.types import (
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    DecisionMade,
    StepFailed,
    StepFinished,
    StepStarted,
    TrainingStarted,
    TrainingStep,
    WorkProgress,
)
from steadytrain.components.shared.quantities import amount, duration, size

PLAIN_SECONDS = 10.0
"""Without a terminal, a piece of work prints at most one line in this time."""


@dataclass
class _Work:
    """A long piece of work and its speed, measured from where it was first seen."""

    stage: str
    name: str
    total: float | None
    first: float
    since: float
    done: float = 0.0
    shown: float = field(default=float("-inf"))

    def advance(self, done: float, time: float) -> tuple[float, float]:
        """Record the progress. Return the rate per second and the seconds left (0: unknown)."""
        self.done = done
        elapsed = time - self.since
        rate = (done - self.first) / elapsed if elapsed > 0 else 0.0
        left = (self.total - done) / rate if self.total and rate > 0 else 0.0
        return rate, left


class _Console(Console):
    """A Rich console that raises if the reader of a pipe is gone, and does not exit the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class ProgressDisplay:
    """A sink that shows events. Feed it with a `Cursor`, and close it at the end."""

    def __init__(self, console: Console | None = None) -> None:
        console = console or _Console()
        self.view: _View = _Live(console) if console.is_terminal else _Plain(console)
        self.work: _Work | None = None
        self.started: dict[str, float] = {}
        self.failed: AttemptEnded | None = None
        self.saved, self.recovering = 0, False

    def emit(self, event: Event) -> None:
        if isinstance(event, WorkProgress):
            self._advance_work(event)
        elif isinstance(event, TrainingStep):
            self._advance_training(event)
        else:
            self._show_event(event)

    def close(self) -> None:
        self._show_failed()
        self.view.close()

    def _show_event(self, event: Event) -> None:
        if self._belongs_to_a_recovery(event):
            return
        self._show_failed()
        if isinstance(event, StepStarted):
            self.started[event.stage] = event.time
        if isinstance(event, StepFinished | StepFailed | AttemptEnded):
            self._end_work()
        text = describe(event)
        if isinstance(event, StepFinished) and event.stage in self.started:
            text = f"{text} ({duration(event.time - self.started.pop(event.stage))})"
        if text:
            self.view.line(text, event.severity)
        if isinstance(event, TrainingStarted):
            self.work = _Work("train", "", event.max_steps, event.step, event.time)

    def _belongs_to_a_recovery(self, event: Event) -> bool:
        """Return whether an event is part of a recovery.

        The failure, the decision and the new start are one line, printed at the decision.
        """
        if isinstance(event, CheckpointSaved):
            self.saved = max(self.saved, event.step)
        elif isinstance(event, AttemptStarted):
            self.saved = event.resumed_from_step or 0
            return self.recovering
        elif isinstance(event, TrainingStarted) and self.recovering:
            self.recovering = False
            self.work = _Work("train", "", event.max_steps, event.step, event.time)
            return True
        elif isinstance(event, AttemptEnded) and event.failure_class:
            self._end_work()
            self.failed = event
            return True
        elif isinstance(event, DecisionMade) and self.failed:
            self.view.line(f"train: {recovery(self.failed, event, self.saved)}", "warn")
            self.failed, self.recovering = None, event.action != "stop"
            return True
        return False

    def _show_failed(self) -> None:
        """Print a failed attempt that no decision followed."""
        if self.failed:
            self.view.line(describe(self.failed), self.failed.severity)
            self.failed = None

    def _advance_work(self, event: WorkProgress) -> None:
        work = self.work
        if work is None or (work.stage, work.name) != (event.stage, event.work):
            self._end_work()
            work = _Work(event.stage, event.work, event.total, event.done, event.time)
        self.work, work.total = work, event.total
        rate, left = work.advance(event.done, event.time)
        if event.unit == "bytes":
            of = f" of {size(event.total)}" if event.total is not None else ""
            parts = [f"{size(event.done)}{of}"] + ([f"{size(rate)}/s"] if rate else [])
        else:
            of = f"/{amount(event.total)}" if event.total is not None else ""
            parts = [f"{amount(event.done)}{of} {event.unit}"]
            parts += [f"{amount(rate)} {event.unit}/s"] if rate else []
        self._show(work, event.time, parts, left)

    def _advance_training(self, event: TrainingStep) -> None:
        work = self.work
        if work is None or work.stage != "train":
            # Training started before this display, so its start was not seen.
            work = _Work("train", "", None, event.step, event.time)
        self.work = work
        _, left = work.advance(event.step, event.time)
        of = f"/{work.total:,.0f}" if work.total else ""
        memory = event.gpu_memory_used or event.memory_used
        parts = [
            f"step {event.step:,}{of}",
            f"loss {event.loss:.4f}",
            f"{amount(event.tokens_per_second)} tokens/s",
            f"memory {size(memory)}",
        ]
        self._show(work, event.time, parts, left)

    def _show(self, work: _Work, time: float, parts: list[str], left: float) -> None:
        if left:
            parts.append(f"{duration(left)} left")
        self.view.show(work, time, ", ".join(parts))

    def _end_work(self) -> None:
        self.work = None
        self.view.end_work()


_STYLES = {"info": "", "warn": "yellow", "error": "red", "fatal": "bold red"}


class _View(Protocol):
    def line(self, text: str, level: str) -> None: ...
    def show(self, work: _Work, time: float, text: str, /) -> None: ...
    def end_work(self) -> None: ...
    def close(self) -> None: ...


class _Plain:
    """Prints a line for each event, and now and then one for the work in progress."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def line(self, text: str, level: str) -> None:
        prefix = "" if level == "info" else f"{level}: "
        self.console.print(Text(prefix + text), soft_wrap=True)

    def show(self, work: _Work, time: float, text: str) -> None:
        if work.done == work.total or time - work.shown >= PLAIN_SECONDS:
            work.shown = time
            self.line(f"{_title(work)}: {text}", "info")

    def end_work(self) -> None:
        pass

    def close(self) -> None:
        pass


class _Live:
    """Prints lines, with a progress bar for the current work below them."""

    def __init__(self, console: Console) -> None:
        self.bars = Bars(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[text]}", markup=False),
            console=console,
            transient=True,
        )
        self.work: _Work | None = None

    def line(self, text: str, level: str) -> None:
        self.bars.console.print(Text(text, style=_STYLES[level]))

    def show(self, work: _Work, _: float, text: str) -> None:
        if self.work is not work:
            self.end_work()
            self.work = work
            self.bars.add_task(_title(work), text=text)
            self.bars.start()
        task = self.bars.task_ids[-1]
        self.bars.update(task, completed=work.done, total=work.total, text=text)

    def end_work(self) -> None:
        self.work = None
        for task in self.bars.task_ids:
            self.bars.remove_task(task)
        self.bars.stop()

    def close(self) -> None:
        self.end_work()


def _title(work: _Work) -> str:
    return f"{work.stage}: {work.name}" if work.name else work.stage

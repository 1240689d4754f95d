"""Tasks that fail, or request something, in the middle of real training.

Use them as `support.faults:Class`. Each acts in the forward pass of the step in FAULT_STEP
(counting from 1, with one micro-batch per step).
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import resource
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.optim.optimizer import register_optimizer_step_pre_hook

from steadytrain.components.tasks.base import Batch, LossSum, Row
from steadytrain.components.tasks.built_in import CAUSAL_LM
from steadytrain.components.tasks.causal_lm import LanguageModelPackager, SupervisedFineTuning
from steadytrain.components.techniques.distillation.teacher import AnsweringTeacher
from steadytrain.components.train.attempt import FINISHING, AttemptFolder, Beat
from steadytrain.components.train.loop import row_losses

from support.limits import address_space, limited, return_freed_memory, take_freed_memory


class Faulty(SupervisedFineTuning):
    """Runs `fault` once, at its step."""

    seen = 0

    def compute_loss(self, model: torch.nn.Module, batch: Batch) -> LossSum:
        self.seen += 1
        found = super().compute_loss(model, batch)
        return self.fault(found) if self.seen == int(os.environ["FAULT_STEP"]) else found

    def fault(self, found: LossSum) -> LossSum:
        return found


class SlowExport(SupervisedFineTuning):
    """Limits collectives to COLLECTIVE_SECONDS."""

    def compute_loss(self, model: torch.nn.Module, batch: Batch) -> LossSum:
        limit = timedelta(seconds=float(os.environ["COLLECTIVE_SECONDS"]))
        distributed_c10d._set_pg_timeout(limit)
        return super().compute_loss(model, batch)


class SlowPackager(LanguageModelPackager):
    """Exports for EXPORT_SECONDS.

    The first attempt to create the file FAULT_FILE kills its own process during the export, once
    the other ranks wait for it.
    """

    def export(self, model: torch.nn.Module, target: Path) -> None:
        end = time.monotonic() + float(os.environ["EXPORT_SECONDS"])
        while time.monotonic() < end:
            sum(range(10_000))
        if file := os.environ.get("FAULT_FILE"):
            with contextlib.suppress(FileExistsError):
                Path(file).touch(exist_ok=False)
                while not all(map(_is_finishing, range(1, int(os.environ["WORLD_SIZE"])))):
                    time.sleep(0.05)
                os.kill(os.getpid(), signal.SIGKILL)
        super().export(model, target)


SLOW_EXPORT = replace(CAUSAL_LM, training=SlowExport, packager=SlowPackager)


class NotANumber(Faulty):
    """The loss of one micro-batch is NaN."""

    def fault(self, found: LossSum) -> LossSum:
        return LossSum(found.total * math.nan)


class InfiniteGradient(Faulty):
    """The loss is finite, but its gradient is not."""

    def fault(self, found: LossSum) -> LossSum:
        found.total.register_hook(lambda gradient: gradient * math.inf)
        return found


class Bug(Faulty):
    """The user's own code raises."""

    def fault(self, found: LossSum) -> LossSum:
        raise KeyError("no such thing; the token is hf_abcdefghijklmnopqrstuvwxyz0123456789")


class DamagesData(Faulty):
    """Damages the file in FAULT_FILE in place, after some of its rows were used."""

    def fault(self, found: LossSum) -> LossSum:
        path = Path(os.environ["FAULT_FILE"])
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.seek(size // 4)
            file.write(b"\x7f" * (size // 2))
        return found


class Stops(Faulty):
    """Writes the attempt's stop file; STOP_FILE and STOP_CONTENT set its path and content."""

    def fault(self, found: LossSum) -> LossSum:
        Path(os.environ["STOP_FILE"]).write_text(os.environ["STOP_CONTENT"])
        return found


class MissingField(SupervisedFineTuning):
    """The user's own code reads a field that no row has."""

    def collate(self, rows: Sequence[Row]) -> Batch:
        return {"input_ids": torch.stack([torch.as_tensor(row["no_such_field"]) for row in rows])}


class PoisonedToken(SupervisedFineTuning):
    """The loss of a batch with the poisoned token is NaN."""

    TOKEN = 63

    def compute_loss(self, model: torch.nn.Module, batch: Batch) -> LossSum:
        found = super().compute_loss(model, batch)
        return (
            LossSum(found.total * math.nan) if (batch["input_ids"] == self.TOKEN).any() else found
        )


class SilentWeight(Faulty):
    """A weight that doesn't affect the loss becomes infinite."""

    def fault(self, found: LossSum) -> LossSum:
        with torch.no_grad():
            self.model.get_input_embeddings().weight[0] = math.inf
        return found

    def build_model(self) -> torch.nn.Module:
        self.model = super().build_model()
        return self.model


class Slow(SupervisedFineTuning):
    """Slows down each micro-batch, so that a fault from outside hits a run in progress."""

    def compute_loss(self, model: torch.nn.Module, batch: Batch) -> LossSum:
        time.sleep(0.05)
        return super().compute_loss(model, batch)


class Paced(SupervisedFineTuning):
    """Each micro-batch sleeps for the number of seconds in the file PACE_FILE, while it exists."""

    def compute_loss(self, model: torch.nn.Module, batch: Batch) -> LossSum:
        with contextlib.suppress(FileNotFoundError):
            time.sleep(float(Path(os.environ["PACE_FILE"]).read_text()))
        return super().compute_loss(model, batch)


class HoldsTheInterpreter(SupervisedFineTuning):
    """A C call that never returns holds the interpreter lock.

    This happens on the rank whose number is in the file FAULT_FILE, as soon as the file exists.
    """

    def compute_loss(self, model: torch.nn.Module, batch: Batch) -> LossSum:
        asked = Path(os.environ["FAULT_FILE"])
        if asked.exists() and asked.read_text() == os.environ.get("RANK", "0"):
            asked.unlink()
            nothing_comes, _ = os.pipe()
            ctypes.PyDLL(None).read(nothing_comes, ctypes.create_string_buffer(1), 1)
        return super().compute_loss(model, batch)


class RunsOut(SupervisedFineTuning):
    """Runs out of memory from a phase of its first step on; torch's allocator raises the error.

    FAULTS contains one phase and rank per attempt, such as "forward:0 backward:1". A smaller
    micro-batch of the same attempt has all the memory again: how much of it fits within the slack
    depends on what other threads take.
    """

    SLACK = 8 << 20

    def __init__(self, *given) -> None:
        super().__init__(*given)
        faults, attempt = os.environ["FAULTS"].split(), attempt_number()
        phase, _, rank = (faults[attempt - 1] if attempt <= len(faults) else "").partition(":")
        self.phase = phase if rank == os.environ.get("RANK", "0") else ""
        self.rows = 0
        return_freed_memory()

    def compute_loss(self, model: torch.nn.Module, batch: Batch) -> LossSum:
        rows = len(batch["input_ids"])
        if rows < self.rows:
            self.phase = ""
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
        self.rows = rows
        if self.phase == "forward":
            self.limit()
        found = super().compute_loss(model, batch)
        if self.phase == "backward":
            found.total.register_hook(self.limit)
        if self.phase == "optimizer":
            register_optimizer_step_pre_hook(self.limit)
        return found

    def limit(self, *_: object) -> None:
        take_freed_memory()
        size = address_space() + self.SLACK
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


class Exhausted(Faulty):
    """Raises CUDA's out-of-memory error FAULT_TIMES in a row, the first time in FAULT_PHASE."""

    raised = 0

    def compute_loss(self, model: torch.nn.Module, batch: Batch) -> LossSum:
        if 0 < self.raised < int(os.environ.get("FAULT_TIMES", "1")):
            self.run_out()
        return super().compute_loss(model, batch)

    def fault(self, found: LossSum) -> LossSum:
        phase = os.environ["FAULT_PHASE"]
        if phase == "backward":
            found.total.register_hook(self.run_out)
        elif phase == "optimizer":
            self.hook = register_optimizer_step_pre_hook(self.run_out)
        else:
            self.run_out()
        return found

    def run_out(self, *_: object) -> None:
        self.raised += 1
        if hasattr(self, "hook"):
            self.hook.remove()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class LittleMemory(SupervisedFineTuning):
    """Another model has SPARE bytes for a pass over rows; torch's allocator raises the error.

    This happens on the ranks in SHORT_RANKS. The first attempt kills itself before its pass number
    KILL_AT. Ranks write losses after each of their batches.
    """

    passes = 0

    def __init__(self, *given) -> None:
        super().__init__(*given)
        ranks = os.environ.get("SHORT_RANKS", "0").split()
        self.short = os.environ.get("RANK", "0") in ranks
        row_losses._ROUND, row_losses._SAVE_SECONDS = 1, 0.0
        return_freed_memory()

    def row_losses(self, model: torch.nn.Module, batch: Batch, counts: Sequence[int]) -> Any:
        with self.limited():
            return super().row_losses(model, batch, counts)

    def open_teacher(self, student: torch.nn.Module) -> AnsweringTeacher:
        teacher = super().open_teacher(student)
        answer = teacher.answer

        def limited(rows: Sequence[Row], device: torch.device) -> list[Row]:
            with self.limited():
                return answer(rows, device)

        teacher.answer = limited
        return teacher

    @contextlib.contextmanager
    def limited(self) -> Iterator[None]:
        self.passes += 1
        if self.passes == int(os.environ.get("KILL_AT", "0")) and attempt_number() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if not self.short:
            yield
            return
        with limited(address_space() + int(os.environ["SPARE"])):
            yield


def attempt_folder() -> AttemptFolder:
    """Return the folder of this rank's attempt, whose name is its number."""
    mark = Path(os.environ["STEADYTRAIN_ATTEMPT"])
    return AttemptFolder(next(path for path in (mark, *mark.parents) if path.name.isdigit()))


def attempt_number() -> int:
    return int(attempt_folder().path.name)


def _is_finishing(rank: int) -> bool:
    beat = Beat.read(attempt_folder().heartbeat(rank))
    return beat is not None and beat.phase == FINISHING

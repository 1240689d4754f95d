"""Profiles a few steps of a rank with torch's profiler."""

from __future__ import annotations

import json
import time
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile

from steadytrain.components.techniques.base import (
    TrainingComponent,
    TrainingContext,
)

FOLDER: Final = "profile"
_OPERATORS: Final = 20
"""Most operators in a summary."""
_ALLOCATIONS: Final = 100_000
"""Most allocations and releases in a snapshot of the memory."""


class StepProfiler(TrainingComponent):
    """Records some steps, and writes a trace, a summary and, on a GPU, a snapshot of the memory.

    Args:
        first: the first step that is recorded.
        last: the last one.
        device: where the rank computes.
    """

    def __init__(self, first: int, last: int, device: torch.device) -> None:
        self.first, self.last, self.cuda = first, last, device.type == "cuda"
        self.device = torch.cuda.get_device_name(device) if self.cuda else "cpu"
        self._profile: profile | None = None

    def begin(self, context: TrainingContext) -> None:
        self.folder, self.rank = context.folder / FOLDER, context.rank

    def before_step(self, step: int) -> None:
        if step != self.first:
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.cuda else [])]
        if self.cuda:
            torch.cuda.memory._record_memory_history(max_entries=_ALLOCATIONS)
            torch.cuda.synchronize()
        self._profile = profile(activities=activities)
        self._profile.start()
        self._began = time.monotonic()

    def after_step(self, step: int) -> None:
        if self._profile is None or step != self.last:
            return
        if self.cuda:
            torch.cuda.synchronize()
        seconds = time.monotonic() - self._began
        self._profile.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        start = str(self.folder / f"rank-{self.rank}")
        self._profile.export_chrome_trace(f"{start}.trace.json.gz")
        summary = self._summary(self._profile, seconds)
        self._profile = None
        if self.cuda:
            torch.cuda.memory._dump_snapshot(f"{start}.memory.pickle")  # type: ignore[no-untyped-call]
            torch.cuda.memory._record_memory_history(enabled=None)
        (self.folder / f"rank-{self.rank}.json").write_text(json.dumps(summary), encoding="utf-8")

    def _summary(self, recorded: profile, seconds: float) -> dict[str, Any]:
        """Return what was recorded, as `observe.profile.RankProfile` reads it."""
        own = "self_device_time_total" if self.cuda else "self_cpu_time_total"
        found = sorted(recorded.key_averages(), key=lambda item: -getattr(item, own))
        operators = [
            {"name": item.key, "seconds": getattr(item, own) / 1e6, "calls": item.count}
            for item in found[:_OPERATORS]
        ]
        return {
            "rank": self.rank,
            "first": self.first,
            "last": self.last,
            "device": self.device,
            "seconds": seconds,
            "busy_seconds": sum(getattr(item, own) for item in found) / 1e6,
            "memory_peak": torch.cuda.max_memory_allocated() if self.cuda else 0,
            "operators": operators,
        }

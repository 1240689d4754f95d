"""Measure how long parts of a step take, without making the device wait."""

from __future__ import annotations

import time
from typing import Any, Final

import torch


class Timer:
    """Adds up time spans, each between `begin` and `end`, or as a context.

    On a GPU, it uses events of the CUDA stream, which runs behind the Python program: what counts
    is how long the stream takes, not the program.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda: Final = device.type == "cuda"
        self._began: Any = None
        self._spans: list[tuple[Any, Any]] = []

    def begin(self) -> None:
        self._began = self._now()

    def end(self) -> None:
        self._spans.append((self._began, self._now()))

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *_: object) -> None:
        self.end()

    def take(self) -> float:
        """Return the seconds of all spans since the last call. On a GPU, wait for their end."""
        spans, self._spans = self._spans, []
        if not self._cuda:
            return float(sum(end - began for began, end in spans))
        for _, end in spans[-1:]:
            end.synchronize()
        return float(sum(began.elapsed_time(end) for began, end in spans)) / 1000

    def take_finished(self) -> float:
        """Return the seconds of the spans that are over, without waiting. The others stay."""
        if not self._cuda:
            return self.take()
        over = [span for span in self._spans if span[1].query()]
        self._spans = [span for span in self._spans if span not in over]
        return float(sum(began.elapsed_time(end) for began, end in over)) / 1000

    def _now(self) -> Any:
        if not self._cuda:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

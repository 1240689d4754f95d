"""Prepare the next global batch in a thread while a step computes.

The rows of a step depend only on its number, so prefetching changes neither the order nor what a
resumed run sees. At most two shares exist: the one in use and the next.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch

from steadytrain.components.tasks.base import Batch
from steadytrain.components.techniques.inference import to_device
from steadytrain.components.train.loop.batches import RankBatches, take_share
from steadytrain.components.train.loop.setup import Parts


class Prefetch:
    """Provides shares of global batches on the device, each fetched one step ahead. Close it."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._thread = ThreadPoolExecutor(1, "prefetch")
        self._ahead: tuple[int, Future[RankBatches]] | None = None
        device = parts.accelerator.device
        # Copies on a separate stream do not wait for the step that is computing.
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """End the thread after its current task."""
        self._thread.shutdown(cancel_futures=True)

    def take(self, step: int) -> RankBatches:
        """Return this rank's share of the global batch of `step`.

        Raises:
            Whatever reading or collating this batch raised, never an error from a later batch.
        """
        began = time.monotonic()
        found = self._fetching(step).result()
        if step + 1 < self.parts.steps:
            self._ahead = step + 1, self._fetching(step + 1)
        return replace(found, waited=time.monotonic() - began)

    def forget(self) -> None:
        """Fetch again what was fetched ahead: micro-batches have another size from now on."""
        self._ahead = None

    def _fetching(self, step: int) -> Future[RankBatches]:
        if self._ahead is not None and self._ahead[0] == step:
            return self._ahead[1]
        return self._thread.submit(self._fetch, step)

    def _fetch(self, step: int) -> RankBatches:
        own = take_share(self.parts, step)
        return replace(own, batches=self._transfer(own.batches))

    def _transfer(self, batches: list[Batch]) -> list[Batch]:
        if self._stream is None:
            return batches
        device = self._stream.device
        pinned = [{name: _pinned(value) for name, value in batch.items()} for batch in batches]
        with torch.cuda.stream(self._stream):
            moved = [to_device(batch, device) for batch in pinned]
        self._stream.synchronize()
        for batch in moved:
            for value in batch.values():
                if isinstance(value, torch.Tensor):
                    # Otherwise, its memory could be reused while the step still reads it.
                    value.record_stream(torch.cuda.default_stream(device))
        return moved


def _pinned(value: object) -> object:
    return value.pin_memory() if isinstance(value, torch.Tensor) else value

"""Answers to many requests at a time: what waits is predicted together, in one thread."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from steadytrain.components.predict.model import ServedModel
from steadytrain.components.tasks.encoding.fields import Defect

Answers = list[dict[str, Any] | Defect]
_WAITING_BATCHES: Final = 16
"""Batches of records that may wait. More are refused, since they would wait for too long."""


class Overloaded(Exception):
    """Too many records wait already."""


@dataclass
class _Request:
    values: Sequence[Any]
    answers: asyncio.Future[Answers]


class Batching:
    """Predicts for what waits, while the model is free, in order of arrival.

    A request never waits for others to come: those that arrive while the model works are the next
    batch. Requests stay whole, so one with more than `batch_size` records is a batch of its own.

    Args:
        batch_size: records per call of the model, if requests are smaller.
        seen: is called with the records and seconds of each batch.

    Attributes:
        waiting: number of records that wait for the model.
        busy_since: by time.monotonic, when the model began with a batch; None if it is free.
    """

    def __init__(
        self, model: ServedModel, batch_size: int, seen: Callable[[int, float], None]
    ) -> None:
        self._model, self._size, self._seen = model, batch_size, seen
        self._waiting = deque[_Request]()
        self._arrived = asyncio.Event()
        # One thread: few models may be called by two.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self.waiting = 0
        self.busy_since: float | None = None

    async def answer(self, values: Sequence[Any], seconds: float) -> Answers:
        """Return a prediction, or why there is none, for each value.

        Args:
            seconds: how long to wait.

        Raises:
            Overloaded: too many records wait already.
            TimeoutError: the time is over. Values that still wait are given up.
        """
        if self.waiting + len(values) > max(self._size * _WAITING_BATCHES, len(values)):
            raise Overloaded
        request = _Request(values, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self.waiting += len(values)
        self._arrived.set()
        try:
            return await asyncio.wait_for(request.answers, seconds)
        finally:
            if request in self._waiting:
                self._waiting.remove(request)
                self.waiting -= len(values)

    async def run(self) -> None:
        """Predict for ever. Cancel it to end it; a call of the model is not interrupted."""
        while True:
            await self._arrived.wait()
            if not self._waiting:
                self._arrived.clear()
                continue
            batch = self._next()
            values = [value for request in batch for value in request.values]
            started = self.busy_since = time.monotonic()
            found = await asyncio.get_running_loop().run_in_executor(
                self._thread, self._model.answer_each, values
            )
            self.busy_since = None
            self._seen(len(values), time.monotonic() - started)
            for request in batch:
                answers, found = found[: len(request.values)], found[len(request.values) :]
                if not request.answers.done():
                    request.answers.set_result(answers)

    def _next(self) -> list[_Request]:
        batch = [self._waiting.popleft()]
        total = len(batch[0].values)
        # All records of a forecast are one history.
        while (
            not self._model.forecasts
            and self._waiting
            and total + len(self._waiting[0].values) <= self._size
        ):
            batch.append(self._waiting.popleft())
            total += len(batch[-1].values)
        self.waiting -= total
        return batch

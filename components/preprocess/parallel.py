"""Run a stream of small jobs on all cores, in order, with few of them in flight."""

from __future__ import annotations

import collections
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib.abc import MetaPathFinder
from typing import Final, TypeVar

import pyarrow as pa

from steadytrain.components.shared.errors import SteadytrainError

SMALL_BYTES: Final = 4 << 20
"""Below this size, starting other processes takes longer than the work."""

J = TypeVar("J")
R = TypeVar("R")


class Workers:
    """Runs functions of a module in other processes. A single worker uses this process."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = _pool(count) if count > 1 else None

    def map(self, function: Callable[[J], R], jobs: Iterable[J]) -> Iterator[R]:
        """Yield results in the order of the jobs, which are consumed only as needed.

        Raises:
            SteadytrainError: a worker was killed.
        """
        if self._pool is None:
            yield from map(function, jobs)
            return
        pending: collections.deque[Future[R]] = collections.deque()
        try:
            for job in jobs:
                pending.append(self._pool.submit(function, job))
                if len(pending) > 2 * self.count:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool as error:
            raise SteadytrainError(
                "a preprocessing worker was killed, most likely because memory ran out",
                remedy="give the step more memory or fewer cores, then start the run again",
            ) from error

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def workers(count: int) -> Iterator[Workers]:
    """Create workers, and stop them when the block ends."""
    current = Workers(count)
    try:
        yield current
    finally:
        current.close()


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def worth_starting(size: int | None) -> int:
    """Return a sensible number of workers for `size` bytes of input. None means an unknown size."""
    return 1 if size is not None and size < SMALL_BYTES else cores()


def _pool(count: int) -> ProcessPoolExecutor:
    # Use spawn, because a fork of a process with threads (Arrow's, boto3's) can hang.
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(count, mp_context=context, initializer=_start)


class _WithoutPandas(MetaPathFinder):
    """Finds no pandas, which Arrow imports for its first array: 0.3 s and 40 MB in each worker.

    A conversion that needs pandas imports it later.
    """

    @classmethod
    def find_spec(cls, name: str, *_: object) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name)


def _start() -> None:
    """Leave Ctrl-C to the parent, and exit if the parent is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if "pandas" not in sys.modules:
        sys.meta_path.insert(0, _WithoutPandas)
        pa.array([])
        sys.meta_path.remove(_WithoutPandas)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_follow, args=(parent,), daemon=True).start()


def _follow(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os._exit(1)

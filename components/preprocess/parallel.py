"""Run a stream of small jobs on all cores, and generators in a process with limited memory.

A columnar file declares its own decoded size, so a file of 500 bytes can ask for gigabytes, and a
corrupted file can crash the library that reads it. Neither may crash the step. Instead, the file is
rejected.
"""

from __future__ import annotations

import collections
import contextlib
import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib.abc import MetaPathFinder
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import pyarrow as pa

from steadytrain.components.shared.bounded import data_bytes
from steadytrain.components.shared.errors import DataError, SteadytrainError
from steadytrain.components.shared.processes import set_title
from steadytrain.components.shared.quantities import size

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
    set_title("worker of preprocess")
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


MEMORY_BYTES: Final = 1 << 30
"""Memory for decoding, on top of what the process uses after its imports."""

T = TypeVar("T")


class IsolatedProcess:
    """A process that starts when it is first needed and ends with the block.

    Args:
        memory: bytes that it may allocate.
    """

    def __init__(self, memory: int = MEMORY_BYTES) -> None:
        self.memory = memory
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def iterate(self, what: str, function: Callable[..., Iterator[T]], *args: Any) -> Iterator[T]:
        """Yield what a module's generator function yields.

        Args:
            what: name to use in errors, such as the file that is read.

        Raises:
            DataError: the process crashed, or needs more memory than allowed.
            SteadytrainError: the function raised it.
        """
        process = self._started()
        assert process.stdin
        assert process.stdout
        try:
            pickle.dump((what, function, args), process.stdin)
            process.stdin.flush()
            while (message := pickle.load(process.stdout)) is not None:
                if isinstance(message, SteadytrainError):
                    raise message
                yield message[0]
        except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:
            raise DataError(
                f"{what}: the file cannot be read: reading it ended with {_end(process)}",
                remedy="fetch or write it again: it is damaged",
            ) from error

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            # Don't use multiprocessing: it would run the user's main module again.
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(self.memory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # Arrow's own allocators reserve more than they use, and that would count.
                env=os.environ | {"ARROW_DEFAULT_MEMORY_POOL": "system"},
            )
        return self._process


def _end(process: subprocess.Popen[bytes]) -> str:
    code = process.wait()
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"


def _serve(memory: int) -> None:
    """Answer requests until there are no more."""
    set_title("reader of data")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    # Keep a library's output separate from the answers.
    os.dup2(2, 1)
    limited = False
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            what, function, args = pickle.load(sys.stdin.buffer)
            if not limited:
                # Set the limit only now: the libraries are imported and don't count.
                _limit(memory)
                limited = True
            try:
                for item in function(*args):
                    pickle.dump((item,), answers)
                answer = None
            except SteadytrainError as error:
                answer = error
            except MemoryError:
                answer = DataError(
                    f"{what}: the file cannot be read: decoding it takes more than {size(memory)}",
                    remedy="write it with smaller record batches or row groups, or leave it out",
                )
            pickle.dump(answer, answers)
            answers.flush()


def _limit(memory: int) -> None:
    """Limit how much memory this process can allocate. Mapped files don't count."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = memory + data_bytes()
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


if __name__ == "__main__":
    _serve(int(sys.argv[1]))

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from steadytrain.components.preprocess.parallel import IsolatedProcess, workers
from steadytrain.components.shared.errors import SteadytrainError


def test_results_are_ordered_and_jobs_taken_lazily() -> None:
    taken = 0

    def jobs() -> Iterator[int]:
        nonlocal taken
        for number in range(-100, 0):
            taken += 1
            yield number

    with workers(2) as pool:
        results = pool.map(abs, jobs())
        assert next(results) == 100
        assert taken < 10
        assert list(results) == list(range(99, 0, -1))


def test_arrow_imports_pandas_in_a_worker_only_for_a_conversion() -> None:
    array, imported = "__import__('pyarrow').array([1])", "'pandas' in __import__('sys').modules"
    with workers(2) as pool:
        assert list(pool.map(eval, [f"({array}, {imported})[1]"])) == [False]
        assert list(pool.map(eval, [f"list({array}.to_pandas())"])) == [[1]]


def test_titles_say_what_a_process_does() -> None:
    title = "open('/proc/self/cmdline').read()"
    with workers(2) as pool:
        assert next(pool.map(eval, [title])).startswith("steadytrain: worker of preprocess")
    with IsolatedProcess() as isolated:
        (found,) = isolated.iterate("title", eval, f"[{title}]")
        assert found.startswith("steadytrain: reader of data")


def test_worker_that_is_killed_is_an_error() -> None:
    with workers(2) as pool, pytest.raises(SteadytrainError, match="worker"):
        list(pool.map(os._exit, [1]))


def test_workers_exit_when_their_parent_is_killed() -> None:
    code = (
        "import sys, time\n"
        "from steadytrain.components.preprocess.parallel import workers\n"
        "if __name__ == '__main__':\n"
        "    with workers(2) as pool:\n"
        "        print(list(pool.map(abs, range(4))), flush=True)\n"
        "        time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"[0, 1, 2, 3]\n"
    children = psutil.Process(parent.pid).children(recursive=True)
    assert children
    os.kill(parent.pid, signal.SIGKILL)
    parent.communicate()
    assert not psutil.wait_procs(children, timeout=300)[1]

"""How long the first page takes: of a thousand runs, and of a run with ten million events.

Run with `pytest -m bench tests/bench/test_views.py -s`. It writes 4 GB. Each figure is that of a
new process's first look, except that the modules are imported and the files are in the page cache.
"""

from __future__ import annotations

import io
import os
import shutil
import time
from collections.abc import Callable

import pytest
from rich.console import Console
from starlette.testclient import TestClient

from steadytrain.components.report.facts import gather
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.events.stream import to_json
from steadytrain.components.shared.events.types import TrainingStep, Validated
from steadytrain.components.shared.workspace import Workspace
from steadytrain.pipelines.runs import list_runs
from steadytrain.pipelines.view.app import application
from steadytrain.pipelines.view.library import Library
from steadytrain.pipelines.view.source import open_source
from steadytrain.pipelines.view.top import show_run, show_runs

from support.written_run import Writer

pytestmark = pytest.mark.bench
RUNS = int(os.environ.get("STEADYTRAIN_BENCH_RUNS", "1000"))
EVENTS = int(os.environ.get("STEADYTRAIN_BENCH_EVENTS", "10000000"))


def seconds(act: Callable[[], object]) -> str:
    """Return how long an action takes, and its CPU time, which other programs change less."""
    start, used = time.perf_counter(), time.process_time()
    act()
    took, cpu = time.perf_counter() - start, time.process_time() - used
    return f"{took:.2f} s ({cpu:.2f} s of CPU time)"


def written(output, run):
    content = {"name": "bench", "run": run, "output": str(output)}
    content |= {
        "data": {"source": ["package:stdlib"]},
        "model": {"config": {"model_type": "llama"}},
    }
    writer = Writer(from_mapping(content))
    writer.again()
    writer.start_step("train")
    return writer


def first_page(output, path: str) -> str:
    client = TestClient(application(open_source(str(output)), hosts=("testserver",)))

    def ask() -> None:
        assert client.get(path).status_code == 200

    return seconds(ask)


def in_terminal(output, run: str = "") -> str:
    library = Library(open_source(str(output)))
    console = Console(file=io.StringIO(), width=160)
    if run:
        return seconds(lambda: show_run(library, run, console))
    return seconds(lambda: show_runs(library.board, "active", 50, console))


def test_first_page_of_a_thousand_runs(tmp_path):
    """Compare with `steadytrain list`, which reads every event."""
    writer = written(tmp_path, "run-0")
    writer.attempt(1, last=4_000, max_steps=4_000)
    for number in range(1, RUNS):
        shutil.copytree(writer.workspace.folder, tmp_path / "runs" / f"run-{number}")
    print(f"\n{RUNS} runs: steadytrain ui {first_page(tmp_path, '/')}", end="")
    print(f", sorted by loss {first_page(tmp_path, '/?sort=loss')}", end="")
    print(f"; steadytrain top {in_terminal(tmp_path)}", end="")
    print(f"; steadytrain list {seconds(lambda: list(list_runs(tmp_path)))}")


def test_page_of_a_run_with_ten_million_events(tmp_path):
    """Compare with the report's way, which reads every event, on a hundredth of them."""
    writer = written(tmp_path, "long")
    writer.attempt(1, last=100, max_steps=EVENTS)
    path = writer.workspace.events / "rank-0.jsonl"
    write_steps(path, EVENTS)
    small = written(tmp_path, "small")
    small.attempt(1, last=100, max_steps=EVENTS)
    write_steps(small.workspace.events / "rank-0.jsonl", EVENTS // 100)
    shown = first_page(tmp_path, "/runs/long")
    whole = seconds(lambda: gather(Workspace(tmp_path, "small")))
    size = path.stat().st_size / 1e9
    print(f"\n{EVENTS:,} events, {size:.1f} GB: steadytrain ui {shown}", end="")
    print(f"; steadytrain top {in_terminal(tmp_path, 'long')}", end="")
    print(f"; the list {first_page(tmp_path, '/')}", end="")
    print(f"; reading every event of a hundredth of it {whole}")


def write_steps(path, count: int) -> None:
    """Append training steps, and a validation after every thousand of them."""
    event = TrainingStep(
        time=1.8e9, attempt=1, step=987654321, epoch=0.5, loss=2.1, learning_rate=1e-4,
        grad_norm=1.0, tokens=1, tokens_per_second=64e3, gpu_memory_used=0, memory_used=10**9,
    )  # fmt: skip
    before, after = to_json(event, job_id="long").split(str(event.step))
    scores = Validated(time=1.8e9, attempt=1, step=1, epoch=0.5, metrics={"loss": 2.2}, best=False)
    with path.open("a", encoding="utf-8") as file:
        for start in range(0, count, 1000):
            steps = range(start + 1, start + 1001)
            file.write("".join(f"{before}{step}{after}\n" for step in steps))
            file.write(f"{to_json(scores, job_id='long')}\n")

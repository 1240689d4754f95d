"""The cost of reporting: between two training steps, and with an MLflow server that hangs.

Run with `pytest -m bench tests/bench/test_telemetry.py -s` on an idle machine.
"""

from __future__ import annotations

import os
import statistics
import time
import types
from collections.abc import Callable
from functools import partial

import pytest
import torch

from steadytrain.components.shared.events import EventStream, JsonLines
from steadytrain.components.shared.events.types import TrainingStep
from steadytrain.components.shared.tracking import MlflowSink
from steadytrain.components.shared.tracking.connect import import_mlflow
from steadytrain.components.train import step
from steadytrain.components.train.loop.progress import Progress
from steadytrain.components.train.loop.reporter import Reporter
from steadytrain.components.train.loop.setup import PhaseSeconds
from steadytrain.components.train.loop.steps import StepResult

from support.isolation import forgetful, isolated
from support.ports import free_port
from support.proxy import proxy_to
from support.stores import Server, empty_store
from support.training import Bench, events_of, language_rows, write_data

__all__ = ["empty_store", "forgetful", "isolated"]

pytestmark = pytest.mark.bench
ROUNDS, CALLS = 30, 50
PAIRS = int(os.environ.get("STEADYTRAIN_BENCH_ROUNDS", "5"))


def milliseconds(act: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        act()
    return (time.perf_counter() - start) / calls * 1000


@pytest.mark.parametrize("store", ["sqlite", "server"])
def test_cost_of_reporting_against_mlflow(tmp_path, empty_store, store):
    """Compare a step report as rank 0 writes it with MLflow's own calls for the same numbers."""
    (tmp_path / "mlflow.db").write_bytes(empty_store.read_bytes())
    server = Server(tmp_path, free_port())
    if store == "server":
        server.start()
    mlflow = import_mlflow()
    mlflow.set_tracking_uri(
        server.uri if store == "server" else f"sqlite:///{tmp_path / 'mlflow.db'}"
    )
    stream = EventStream(JsonLines(tmp_path / "events" / "rank-0.jsonl", job_id="run"))
    reporter = Reporter(stream, 1)
    training = types.SimpleNamespace(global_batch_size=4)
    parts = types.SimpleNamespace(
        accelerator=types.SimpleNamespace(device=torch.device("cpu")),
        config=types.SimpleNamespace(training=training),
        train=range(100),
    )
    progress = Progress(step=7, window_loss=1.234567, window_weight=3.0)
    result = StepResult(0.5, 0.5, 0.5, overflow=False, phases=PhaseSeconds(), waits=[0.5])
    numbers = dict.fromkeys("abcdefg", 0.123456)

    def report() -> None:
        reporter.count(128, 128, 0.01, 0.0, result)
        reporter.step(parts, progress, result)

    acts = {
        "steadytrain": (report, CALLS),
        "mlflow asynchronous": (partial(mlflow.log_metrics, numbers, synchronous=False), 20),
        "mlflow synchronous": (partial(mlflow.log_metrics, numbers), 2),
    }
    taken: dict[str, list[float]] = {name: [] for name in acts}
    with mlflow.start_run():
        for _ in range(ROUNDS):
            for name, (act, calls) in acts.items():
                act()
                taken[name].append(milliseconds(act, calls))
                mlflow.flush_async_logging()
    server.kill()
    medians = {name: statistics.median(values) for name, values in taken.items()}
    for name, value in medians.items():
        ratio = value / medians["steadytrain"]
        print(f"\n{store}: {name}: {value:.4f} ms a report, {ratio:.1f} x", end="")
    print()
    assert medians["steadytrain"] < medians["mlflow asynchronous"]


def test_cost_of_a_hanging_mlflow(tmp_path):
    """Compare the steps and the full run with a hanging server against runs without tracking."""
    data = write_data(tmp_path / "data", language_rows(60), language_rows(8, seed=1))
    training = {
        "max_steps": 1500,
        "global_batch_size": 4,
        "learning_rate": 1e-3,
        "eval_steps": 1500,
        "save_steps": 1500,
        "logging_steps": 1,
    }
    compute = {"device": "cpu", "threads_per_rank": 1}

    def run(name: str, uri: str | None) -> tuple[float, float]:
        bench = Bench.make(
            tmp_path / "output",
            data,
            run=name,
            training=training,
            compute=compute,
            tracking={"uri": uri},
        )
        bench.workspace.create()
        start = time.perf_counter()
        sinks = [MlflowSink(bench.config, bench.workspace)] if uri else []
        assert step.run(bench.config, bench.data, sinks=sinks).succeeded
        for sink in sinks:
            sink.close()
        whole = time.perf_counter() - start
        told = events_of(bench.workspace, TrainingStep)
        return told[-1].time - told[0].time, whole

    with proxy_to(9) as proxy:
        proxy.usual = "hang"
        pairs = [
            (run(f"without-{number}", None), run(f"hangs-{number}", proxy.uri))
            for number in range(PAIRS)
        ]
    for part, name in enumerate(("steps", "whole run")):
        ratio = statistics.median(hangs[part] / without[part] for without, hangs in pairs)
        seconds = statistics.median(without[part] for without, _ in pairs)
        print(f"\n{name}: {seconds:.1f} s without tracking; x {ratio:.3f} with a server that hangs")

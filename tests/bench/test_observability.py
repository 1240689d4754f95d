"""What observing a run costs: everything on against everything off, and each part alone."""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from steadytrain.components.observe.alerts import AlertSink
from steadytrain.components.observe.diagnosis.findings import DiagnosisSink
from steadytrain.components.observe.prometheus import PrometheusSink
from steadytrain.components.observe.run_metrics import RunMetrics
from steadytrain.components.shared import webhook
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import TrainingStep
from steadytrain.components.shared.log import following
from steadytrain.components.train import step
from steadytrain.components.train.launch.launcher import launcher_for
from steadytrain.components.train.loop.monitors import LayerHistograms, LayerMonitor
from steadytrain.components.train.loop.training import Training

from support.ports import free_port
from support.timed_rank import PROGRAM, marks_of
from support.training import Bench, events_of, language_rows, write_data
from support.written_run import Writer

pytestmark = [pytest.mark.bench, pytest.mark.timeout(7200)]
PAIRS = int(os.environ.get("STEADYTRAIN_BENCH_ROUNDS", "5"))
STEPS = 200


LAYERS = {"monitor": {"layers": True}}
MODEL = {
    "config": {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
    }
}
"""4 million parameters: large enough that a step is computation, not Python."""


@contextlib.contextmanager
def hanging(port: int) -> Iterator[None]:
    """Ask for the metrics, and never read the answer, like a scraper that hangs."""
    clients = [socket.socket() for _ in range(4)]
    done = threading.Event()

    def work() -> None:
        for client in clients:
            while client.connect_ex(("127.0.0.1", port)) and not done.wait(0.2):
                pass
            with contextlib.suppress(OSError):
                client.sendall(b"GET /metrics HTTP/1.0\r\n")

    thread = threading.Thread(target=work)
    thread.start()
    yield
    done.set()
    thread.join()
    for client in clients:
        client.close()


@contextlib.contextmanager
def hanging_webhook() -> Iterator[str]:
    """Accept connections, and never answer."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/"


@pytest.mark.parametrize(
    ("field", "monitor"), [("layers", LayerMonitor), ("histograms", LayerHistograms)]
)
def test_monitor_of_layers(tmp_path, field, monitor):
    """The share of a rank's time in the monitor, with the interval that is the default."""
    torch.set_num_threads(1)
    rows = language_rows(200, longest=256)
    data = write_data(tmp_path / "data", rows, [], sequence_length=256)
    training = {"global_batch_size": 8, "max_steps": 60, "save_steps": 60, "logging_steps": 10}

    def run(name: str, **more: object) -> tuple[float, float]:
        """Return the CPU seconds of the steps, and of the monitor in them."""
        spent, marks = [0.0], []

        def timed(hook):
            def call(self, update):
                began = time.thread_time()
                hook(self, update)
                spent[0] += time.thread_time() - began

            return call

        bench = Bench.make(
            tmp_path / "output", data, run=name, model=MODEL, training={**training, **more}
        )
        with pytest.MonkeyPatch.context() as patch:
            for hook in ("before_update", "after_update"):
                patch.setattr(monitor, hook, timed(getattr(monitor, hook)))
            patch.setattr(Training, "_step", marked(Training._step, marks))
            bench.train_here()
        return sum(marks[5:]), spent[0]

    pairs = [(run(f"plain-{n}"), run(f"watched-{n}", monitor={field: True})) for n in range(PAIRS)]
    ratios = sorted(watched[0] / plain[0] for plain, watched in pairs)
    shares = sorted(watched[1] / watched[0] for _, watched in pairs)
    print(
        f"\nsteps with training.monitor.{field}: x {statistics.median(ratios):.3f} of CPU time "
        f"(from {ratios[0]:.3f} to {ratios[-1]:.3f}); {statistics.median(shares):.2%} in the "
        f"monitor (from {shares[0]:.2%} to {shares[-1]:.2%})"
    )


def marked(step, marks):
    """Return a step that notes its CPU seconds in this thread."""

    def call(*given):
        began = time.thread_time()
        result = step(*given)
        marks.append(time.thread_time() - began)
        return result

    return call


@contextlib.contextmanager
def scraped(port: int, seconds: float = 1.0) -> Iterator[list[int]]:
    """Fetch the metrics every second, 15 times as often as Prometheus does."""
    sizes: list[int] = []
    done = threading.Event()

    def work() -> None:
        while not done.wait(seconds):
            with (
                contextlib.suppress(urllib.error.URLError, ConnectionError),
                urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer,
            ):
                sizes.append(len(answer.read()))

    thread = threading.Thread(target=work)
    thread.start()
    yield sizes
    done.set()
    thread.join()


def test_steps_with_everything_on(tmp_path, monkeypatch):
    """Every step is reported, so that the cost is as high as it can be."""
    timed = partial(launcher_for, program=PROGRAM)
    monkeypatch.setattr(step, "launcher_for", timed)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    rows = language_rows(60, longest=128)
    data = write_data(tmp_path / "data", rows, rows[:8], sequence_length=128)
    training = {
        "max_steps": STEPS,
        "global_batch_size": 4,
        "learning_rate": 1e-3,
        "eval_steps": STEPS,
        "save_steps": STEPS,
        "logging_steps": 1,
    }

    def run(name: str, *, watched: bool) -> tuple[float, float, float]:
        """Return seconds of the steps: by the clock, of CPU in the rank, and in this process."""
        port = free_port()
        observability = {
            "prometheus_port": port,
            "prometheus_linger_seconds": 0,
            "logs": "json",
            "budget_usd": 1e-6,
        }
        bench = Bench.make(
            tmp_path / "output",
            data,
            run=name,
            model=MODEL,
            training={**training, **(LAYERS if watched else {})},
            compute={"device": "cpu", "threads_per_rank": 1, "price_per_hour": 1.0},
            tracking={"sinks": []},
            observability=observability if watched else {"diagnosis": False},
        )
        bench.workspace.create()
        began = time.process_time()
        with contextlib.ExitStack() as opened:
            sinks = []
            if watched:
                output = opened.enter_context((tmp_path / f"{name}.log").open("w"))
                opened.enter_context(contextlib.redirect_stdout(output))
                opened.enter_context(following(bench.config, bench.workspace))
                patch = opened.enter_context(pytest.MonkeyPatch.context())
                patch.setenv(webhook.VARIABLE, opened.enter_context(hanging_webhook()))
                for kind in (PrometheusSink, DiagnosisSink, AlertSink):
                    sinks.append(kind(bench.config, bench.workspace))
                    opened.callback(sinks[-1].close)
                opened.enter_context(hanging(port))
                sizes = opened.enter_context(scraped(port))
            assert step.run(bench.config, bench.data, sinks=sinks).succeeded
            assert not watched or sizes
        late = events_of(bench.workspace, TrainingStep)[STEPS // 10 :]
        marks = marks_of(bench.workspace.attempts / "0001")[STEPS // 10 :]
        return late[-1].time - late[0].time, marks[-1] - marks[0], time.process_time() - began

    pairs = [
        (run(f"without-{number}", watched=False), run(f"watched-{number}", watched=True))
        for number in range(PAIRS)
    ]
    for part, name in enumerate(("the clock", "CPU time of the rank")):
        ratios = sorted(watched[part] / without[part] for without, watched in pairs)
        seconds = statistics.median(without[part] for without, _ in pairs)
        print(
            f"\n{STEPS} steps by {name}: {seconds:.2f} s without; "
            f"x {statistics.median(ratios):.3f} "
            "with everything on, and a scraper and a webhook that hang "
            f"(from {ratios[0]:.3f} to {ratios[-1]:.3f})",
            end="",
        )
    extra = statistics.median(watched[2] - without[2] for without, watched in pairs)
    print(f"\nthe supervisor: {extra / STEPS * 1000:.2f} ms of CPU time more for each report")


def test_metrics_of_a_long_run(tmp_path):
    """How long a supervisor that takes over needs to rebuild the metrics."""

    content = {"data": {"source": ["a.txt"]}, "model": {"config": {"model_type": "llama"}}}
    run = Writer(from_mapping({**content, "name": "long", "output": str(tmp_path)}))
    run.attempt(1, last=200_000, max_steps=200_000, every=1, save_every=500)
    start = time.process_time()
    metrics = RunMetrics.of(read_events(run.workspace.events))
    rebuilt = time.process_time() - start
    start = time.process_time()
    for _ in range(100):
        metrics.current()
    scrape = (time.process_time() - start) / 100
    print(f"\n200,000 steps: {rebuilt:.1f} s of CPU time; {scrape * 1000:.2f} ms for each scrape")

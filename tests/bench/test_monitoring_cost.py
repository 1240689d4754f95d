"""What watching a run costs: metrics that are scraped, and a log, against neither."""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from steadytrain.components.observe.prometheus import PrometheusSink
from steadytrain.components.observe.run_metrics import RunMetrics
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import TrainingStep
from steadytrain.components.shared.logs import following
from steadytrain.components.train import step

from support.ports import free_port
from support.training import Bench, events_of, language_rows, write_data
from support.written_run import Writer

pytestmark = pytest.mark.bench
PAIRS = int(os.environ.get("STEADYTRAIN_BENCH_ROUNDS", "5"))
STEPS = 600


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


def test_steps_with_everything_on(tmp_path):
    """Every step is reported, so that the cost is as high as it can be."""
    data = write_data(tmp_path / "data", language_rows(60), language_rows(8, seed=1))
    training = {
        "max_steps": STEPS,
        "global_batch_size": 4,
        "learning_rate": 1e-3,
        "eval_steps": STEPS,
        "save_steps": STEPS,
        "logging_steps": 1,
    }

    def run(name: str, *, watched: bool) -> tuple[float, float]:
        """Return the seconds of the steps, and the CPU seconds of the supervisor's process."""
        port = free_port()
        observability = {"prometheus_port": port, "prometheus_linger_seconds": 0, "logs": "json"}
        bench = Bench.make(
            tmp_path / "output",
            data,
            run=name,
            training=training,
            compute={"device": "cpu", "threads_per_rank": 1},
            tracking={"sinks": []},
            observability=observability if watched else {},
        )
        bench.workspace.create()
        began = time.process_time()
        with contextlib.ExitStack() as opened:
            sinks = []
            if watched:
                output = opened.enter_context((tmp_path / f"{name}.log").open("w"))
                opened.enter_context(contextlib.redirect_stdout(output))
                opened.enter_context(following(bench.config, bench.workspace))
                sinks = [PrometheusSink(bench.config, bench.workspace)]
                opened.callback(sinks[0].close)
                sizes = opened.enter_context(scraped(port))
            assert step.run(bench.config, bench.data, sinks=sinks).succeeded
            assert not watched or sizes
        told = events_of(bench.workspace, TrainingStep)
        return told[-1].time - told[0].time, time.process_time() - began

    pairs = [
        (run(f"without-{number}", watched=False), run(f"watched-{number}", watched=True))
        for number in range(PAIRS)
    ]
    ratios = sorted(watched[0] / without[0] for without, watched in pairs)
    seconds = statistics.median(without[0] for without, _ in pairs)
    extra = statistics.median(watched[1] - without[1] for without, watched in pairs)
    print(
        f"\n{STEPS} steps: {seconds:.1f} s without; x {statistics.median(ratios):.3f} with metrics "
        f"and log (from {ratios[0]:.3f} to {ratios[-1]:.3f}); {extra / STEPS * 1000:.2f} ms of CPU "
        "time more for each report"
    )


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

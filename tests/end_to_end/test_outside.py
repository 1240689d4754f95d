"""External services fail while a run trains."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import pytest

from steadytrain.components.shared.events.types import (
    AttemptStarted,
    CheckpointSaved,
    TrainingStep,
    Warned,
)
from steadytrain.components.shared.storage import s3
from steadytrain.components.shared.tracking import MlflowSink, finish_run, pull_sink, use_tracking
from steadytrain.components.train import step

from support.command import wait_for
from support.forked import ForkedLauncher, train
from support.pause import Pause
from support.proxy import proxy_to
from support.s3 import CREDENTIALS, make_bucket, moto_server, set_credentials
from support.stores import empty_store, serving
from support.training import Bench, events_of, weights_digest

__all__ = ["empty_store"]

RECIPE = {
    "max_steps": 300,
    "global_batch_size": 4,
    "micro_batch_size": 2,
    "learning_rate": 5e-3,
    "eval_steps": 50,
    "save_steps": 10,
    "logging_steps": 1,
}
SUPERVISED = (
    "import sys\n"
    "from steadytrain.components.shared.config import load\n"
    "from steadytrain.components.train.step import run_stage\n"
    "run_stage(load(sys.argv[1]))\n"
)


@pytest.fixture(scope="module")
def make_bench(tmp_path_factory, data):
    def make(name, *, ranks=1, training=RECIPE, **sections):
        compute = {"device": "cpu", "nproc_per_node": ranks, "threads_per_rank": 1}
        output = tmp_path_factory.mktemp("output")
        return Bench.make(output, data, run=name, training=training, compute=compute, **sections)

    return make


@pytest.fixture(scope="module")
def undisturbed(make_bench):
    """Return a function from ranks and steps to the weights digest of an undisturbed run."""

    @functools.cache
    def digest(ranks, max_steps):
        bench = make_bench("undisturbed", ranks=ranks, training={**RECIPE, "max_steps": max_steps})
        assert train(bench).succeeded
        return weights_digest(bench.workspace)

    return digest


@pytest.fixture
def server(tmp_path, empty_store):
    with serving(tmp_path / "server", empty_store) as server:
        yield server


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    monkeypatch.setattr(pull_sink, "FIRST_DELAY_SECONDS", 0.1)
    monkeypatch.setattr(pull_sink, "LAST_DELAY_SECONDS", 0.5)


class Breaks:
    """Gives the MLflow server a new fault every ten steps.

    It waits until the fault has hit a request: that of the step, which another sink gets after this
    one does.
    """

    def __init__(self, proxy, server):
        self.proxy, self.server = proxy, server
        self.troubles = ["500", "lose", "forward", "503", "reset", "truncate", "hang"]
        self.waits = False

    def emit(self, event):
        if not isinstance(event, TrainingStep):
            return
        if self.waits:
            wait_for(lambda: self.proxy.usual in self.proxy.done)
            self.waits = False
        if event.step % 10 == 0:
            if self.troubles:
                self.proxy.done.clear()
                self.proxy.usual = self.troubles.pop(0)
                self.waits = True
            else:
                self.proxy.usual = "forward"
                self.server.kill()

    def close(self):
        pass


def told(config, workspace):
    """Return what MLflow stored: (step, loss) of every point, by attempt."""
    tracking = use_tracking(config, workspace)
    found = {}
    for run in tracking.client.search_runs([tracking.experiment_id]):
        if run.info.run_name.startswith("attempt-"):
            history = tracking.client.get_metric_history(run.info.run_id, "loss")
            points = sorted((point.step, point.value) for point in history)
            assert run.info.run_name not in found
            found[run.info.run_name] = points
    return found


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_mlflow_failures_change_no_weights_and_lose_no_point(
    make_bench, undisturbed, server, impatient, tmp_path, monkeypatch, ranks
):
    """One supervisor is killed while MLflow hangs; the next one meets every other fault.

    MLflow is killed before the run ends and comes back after it has finished.
    """
    with proxy_to(server.port) as proxy:
        run = make_bench("disturbed", ranks=ranks, tracking={"uri": proxy.uri})
        workspace = run.workspace
        workspace.create()
        workspace.config.write_text(run.config.to_yaml())
        run.data.save(workspace.record("preprocess"))

        proxy.usual, pause = "hang", Pause(tmp_path / "pause", 0)
        first = subprocess.Popen(
            [sys.executable, "-c", SUPERVISED, str(workspace.config)],
            env={**os.environ, **pause.everywhere},
        )
        wait_for(lambda: events_of(workspace, CheckpointSaved) and proxy.seen)
        first.kill()
        first.wait()

        sink = MlflowSink(run.config, workspace, batch_seconds=0.05)
        breaks = Breaks(proxy, server)
        outcome = step.run(run.config, run.data, sinks=[breaks, sink])
        assert (outcome.outcome, outcome.attempts) == ("finished", 2)
        assert not breaks.troubles
        sink.close()
        assert not finish_run(run.config, workspace, ok=True)

        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "120")
        server.start()
        assert finish_run(run.config, workspace, ok=True)
        assert weights_digest(workspace) == undisturbed(ranks, RECIPE["max_steps"])
        expected = {
            f"attempt-{attempt.attempt}": [
                (event.step, event.loss)
                for event in events_of(workspace, TrainingStep)
                if event.attempt == attempt.attempt
            ]
            for attempt in events_of(workspace, AttemptStarted)
        }
        assert told(run.config, workspace) == expected
        assert len(events_of(workspace, Warned)) <= 3


class BreaksStorage:
    """Injects faults into each checkpoint's requests, and kills the ranks during one upload.

    Rank 0 is paused at each checkpoint until the faults of the next one are there.
    """

    def __init__(self, proxy, launcher, file):
        self.proxy, self.launcher, self.pause = proxy, launcher, Pause(file, 0)
        launcher.environment |= self.pause.environment
        self.troubles = [["500", "503"], ["reset", "lose"], ["truncate"]]
        self.killed = False

    def emit(self, event):
        if isinstance(event, AttemptStarted):
            self.proxy.queued.extend(["503", "500", "reset"])
        if isinstance(event, CheckpointSaved):
            if self.troubles:
                self.proxy.queued.extend(self.troubles.pop(0))
                self.pause.set(event.step + 1)
            elif not self.killed:
                self.killed = True
                self._kill_in_upload()

    def close(self):
        pass

    def _kill_in_upload(self):
        self.proxy.concerns = lambda method, _path: method == "PUT"
        self.proxy.queued.extend(["forward", "hang"])
        self.pause.set(None)
        wait_for(lambda: "hang" in self.proxy.done)
        self.launcher.kill(*range(self.launcher.world_size))
        self.proxy.queued.clear()


@pytest.mark.core
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_run_with_checkpoints_on_s3_survives_s3_failures(
    make_bench, undisturbed, tmp_path, monkeypatch, ranks
):
    steps = 80
    set_credentials(monkeypatch)
    monkeypatch.setattr(s3, "READ_SECONDS", 2.0)
    with moto_server() as port, proxy_to(port) as proxy:
        make_bucket(port, "bucket")
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.uri)
        run = make_bench(
            "on-s3",
            ranks=ranks,
            training={**RECIPE, "max_steps": steps, "eval_steps": steps},
            recovery={"checkpoints": "s3://bucket/runs", "backoff_seconds": 0},
        )
        launcher = ForkedLauncher(ranks, AWS_ENDPOINT_URL_S3=proxy.uri, **CREDENTIALS)
        breaks = BreaksStorage(proxy, launcher, tmp_path / "pause")
        outcome = train(run, launcher=launcher, sinks=[breaks])
        assert outcome.outcome == "finished"
        assert breaks.killed
        assert {"500", "503", "reset", "lose", "truncate", "hang"} <= proxy.done
    assert weights_digest(run.workspace) == undisturbed(ranks, steps)
    assert events_of(run.workspace, AttemptStarted)[-1].resumed_from_step >= 40

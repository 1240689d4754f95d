"""Supervisors that die or hang: another one takes over, and they never interfere."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from steadytrain.components.shared.errors import RunBusy
from steadytrain.components.shared.events.types import (
    AttemptStarted,
    SupervisorStarted,
)
from steadytrain.components.shared.lease import Generations, hold
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.train import step
from steadytrain.components.train.agent.processes import processes_of
from steadytrain.components.train.attempt import AttemptFolder, AttemptSpec
from steadytrain.components.train.checkpoint import checkpoints_of
from steadytrain.components.train.checkpoint.store import committed
from steadytrain.components.train.recovery.ledger import Ledger
from steadytrain.components.train.recovery.supervisor import Supervisor
from steadytrain.components.train.recovery.takeover import inputs_digest

from support.command import paused_rank, wait_for
from support.forked import ForkedLauncher
from support.pause import Pause
from support.proxy import proxy_to
from support.s3 import CREDENTIALS, make_bucket, moto_server
from support.training import Bench, language_rows, weights_digest, write_data

RECIPE = {
    "max_steps": 60,
    "global_batch_size": 4,
    "micro_batch_size": 2,
    "learning_rate": 5e-3,
    "eval_steps": 20,
    "save_steps": 4,
    "logging_steps": 1,
}
# Ranks without a supervisor end after half of the lease, if a busy machine did not renew it, too.
RECOVERY = {"lease_seconds": 40, "stop_grace_seconds": 1, "backoff_seconds": 0}
SUPERVISE = """
import sys
from steadytrain.components.shared.config import load
from steadytrain.components.train.step import run
run(load(sys.argv[1]))
"""


@pytest.fixture
def bench(tmp_path):
    data = write_data(tmp_path / "data", language_rows(60), language_rows(8, seed=1))

    def make(run, task, *, ranks=1, training=RECIPE, **recovery):
        return Bench.make(
            tmp_path / "output",
            data.model_copy(update={"task": task}),
            run=run,
            training=training,
            compute={"device": "cpu", "nproc_per_node": ranks, "threads_per_rank": 1},
            recovery={**RECOVERY, **recovery},
        )

    return make


@pytest.fixture
def pause(tmp_path):
    """Pause the ranks of separate supervisors at their first checkpoint."""
    return Pause(tmp_path / "pause", 0)


@pytest.fixture
def supervise(pause):
    """Return a function that starts a supervisor as a separate program."""
    begun = []

    def start(bench):
        bench.workspace.create()
        bench.workspace.config.write_text(bench.config.to_yaml())
        bench.data.save(bench.workspace.record("preprocess"))
        command = [sys.executable, "-c", SUPERVISE, str(bench.workspace.config)]
        environment = {**os.environ, **pause.everywhere}
        begun.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
        return begun[-1]

    yield start
    for program in begun:
        program.kill()
        program.communicate()


def test_rank_of_a_superseded_supervisor_commits_nothing(bench):
    """A node was cut off: its rank continues, but another supervisor has taken over the run."""
    run = bench("run", "causal_lm")
    for generation in (1, 2):
        with hold(LocalStorage(run.workspace.lease), run_id="run", seconds=60) as lease:
            assert lease.generation == generation
    with pytest.raises(RunBusy, match="taken over by"):
        run.train_here()
    assert not committed(run.workspace.checkpoints)
    assert not run.workspace.model.exists()


class LetsOn:
    """Releases a delayed request from the network when the next supervisor starts its attempt."""

    def __init__(self, proxy, path):
        self.proxy, self.path = proxy, path

    def emit(self, event):
        if isinstance(event, AttemptStarted):
            self.proxy.let_on.set()
            wait_for(lambda: f"PUT {self.path}" in self.proxy.answered)

    def close(self):
        pass


def test_commit_in_flight_at_a_takeover_is_never_used(bench, monkeypatch):
    """The rank has checked the lease and sent its COMMIT; then the rank and the supervisor die."""
    training = {**RECIPE, "max_steps": 12, "save_total_limit": 9}
    late = "/bucket/runs/run/step-00000008/COMMIT"
    with moto_server() as port, proxy_to(port) as proxy:
        make_bucket(port, "bucket")
        there = {"AWS_ENDPOINT_URL_S3": proxy.uri, **CREDENTIALS}
        for name, value in there.items():
            monkeypatch.setenv(name, value)
        run = bench("run", "causal_lm", training=training, checkpoints="s3://bucket/runs")
        address, launcher = checkpoints_of(run.config), ForkedLauncher(**there)
        proxy.concerns = lambda method, path: (method, path) == ("PUT", late)
        proxy.queued.append("late")

        ledger = Ledger(run.workspace)
        with hold(LocalStorage(run.workspace.lease), run_id="run", seconds=60) as ledger.lease:
            ledger.record(SupervisorStarted(generation=1, pid=1, host="gone", checkpoints=[]))
            folder = AttemptFolder(run.attempt())
            spec = AttemptSpec.load(folder.spec)
            ledger.record(
                AttemptStarted(
                    attempt=spec.attempt,
                    world_size=1,
                    batch=spec.batch,
                    gradient_accumulation_steps=spec.gradient_accumulation_steps,
                    inputs=inputs_digest(run.config, run.data),
                )
            )
            spec.model_copy(update={"generation": 1, "checkpoints": []}).save(folder.spec)
            with launcher.start(folder):
                wait_for(lambda: "late" in proxy.done)
        assert [item.step for item in committed(address)] == [4]

        sinks = [LetsOn(proxy, late)]
        assert Supervisor(run.config, run.data, launcher, sinks=sinks).run().succeeded
        found = {item.step: item.manifest.generation for item in committed(address)}
        assert found == {4: 1, 8: 2, 12: 2}
        told = AttemptFolder(run.workspace.attempts / "0002").log(0).read_text()
        assert "step-00000008 was committed by generation 1 of the run's supervisors" in told
    undisturbed = bench("undisturbed", "causal_lm", training=training)
    assert Supervisor(undisturbed.config, undisturbed.data, ForkedLauncher()).run().succeeded
    assert weights_digest(run.workspace) == weights_digest(undisturbed.workspace)


def test_one_of_two_ranks_is_killed_and_another_finishes(bench, supervise, pause):
    run, undisturbed = (
        bench(name, "causal_lm", ranks=2, lease_seconds=3600) for name in ("run", "undisturbed")
    )
    killed = supervise(run)
    paused_rank(pause, killed)
    killed.kill()
    killed.wait()
    wait_for(lambda: not processes_of(run.workspace.attempts))

    for one, attempts in ((run, 2), (undisturbed, 1)):
        outcome = Supervisor(one.config, one.data, ForkedLauncher(2)).run()
        assert (outcome.outcome, outcome.attempts) == ("finished", attempts)
    assert weights_digest(run.workspace) == weights_digest(undisturbed.workspace)


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2])
def test_third_supervisor_finishes_after_one_is_killed_and_one_is_frozen(
    bench, supervise, pause, ranks
):
    undisturbed = bench("undisturbed", "causal_lm", ranks=ranks)
    run = bench("run", "causal_lm", ranks=ranks)
    workspace = run.workspace
    assert step.run(undisturbed.config, undisturbed.data).succeeded

    killed = supervise(run)
    paused_rank(pause, killed)
    with pytest.raises(RunBusy, match=f"process {killed.pid} on "):
        step.run(run.config, run.data)
    killed.kill()
    killed.wait()
    wait_for(lambda: not processes_of(workspace.attempts))

    pause.set(0)
    stopped = supervise(run)
    paused_rank(pause, stopped)
    stopped.send_signal(signal.SIGSTOP)
    # The agent does not depend on its supervisor: when the lease expires, the ranks exit.
    wait_for(lambda: not processes_of(workspace.attempts))
    pause.set(None)

    outcome = step.run(run.config, run.data)
    assert (outcome.outcome, outcome.attempts) == ("finished", 3)
    assert weights_digest(workspace) == weights_digest(undisturbed.workspace)
    assert Generations(LocalStorage(workspace.lease)).last() == 3
    attempts = Ledger(workspace).history().attempts
    assert [attempt.started.attempt for attempt in attempts] == [1, 2, 3]
    assert [attempt.ended.failure_class for attempt in attempts] == ["node_lost", "node_lost", ""]

    written = Ledger(workspace).history()
    stopped.send_signal(signal.SIGCONT)
    _, err = stopped.communicate(timeout=600)
    assert stopped.returncode != 0
    assert f"taken over by process {os.getpid()}" in err
    assert Ledger(workspace).history() == written
    assert not processes_of(workspace.attempts)

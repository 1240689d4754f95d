"""Training components and an order of another package in full runs that are killed."""

from __future__ import annotations

import os

import pytest

from steadytrain.components.shared import plugins
from steadytrain.components.shared.errors import TrainingFailed
from steadytrain.components.shared.events.types import AttemptStarted, CheckpointSaved
from steadytrain.components.train import step
from steadytrain.components.train.checkpoint.store import committed

from support.pause import Pause
from support.plugins import install_example, write_plugin
from support.ranks import ranks_of
from support.training import Bench, events_of, weights_digest

COMPONENTS = {"ema": {"decay": 0.9}, "grad_norms": {}}
RECIPE = {
    "max_steps": 12,
    "global_batch_size": 4,
    "micro_batch_size": 2,
    "learning_rate": 5e-3,
    "eval_steps": 4,
    "save_steps": 4,
    "logging_steps": 1,
    "order": "shortest_first",
    "components": COMPONENTS,
}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return install_example(tmp_path_factory.mktemp("example"))


def attempts(workspace):
    return len(events_of(workspace, AttemptStarted))


def last(workspace):
    return committed(workspace.checkpoints)[-1]


def same_state(one, other):
    first, second = last(one), last(other)
    for part in ("model", "optimizer", "component-ema"):
        tensors, others = first.tensors(part), second.tensors(part)
        assert tensors.keys() == others.keys()
        assert all(tensors[name].equal(others[name]) for name in tensors), part
    assert first.state()["components"] == second.state()["components"]


class KillsRankOnce:
    """Kills a rank at the run's first checkpoint, where rank 0 is paused."""

    def __init__(self, workspace, rank, pause):
        self.workspace, self.rank, self.pause, self.done = workspace, rank, pause, False

    def emit(self, event):
        if isinstance(event, CheckpointSaved) and not self.done:
            self.done = True
            rank = ranks_of(self.workspace.attempts / f"{event.attempt:04d}")[self.rank]
            rank.kill()
            rank.wait()
            self.pause.set(None)

    def close(self):
        pass


@pytest.fixture
def make_bench(tmp_path, data, site, monkeypatch):
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", f"{site}:{os.environ.get('PYTHONPATH', '')}")

    def make(run, strategy="ddp", ranks=2, **training):
        compute = {"device": "cpu", "nproc_per_node": ranks, "threads_per_rank": 1}
        return Bench.make(
            tmp_path / "output",
            data,
            run=run,
            training={**RECIPE, **training},
            compute={**compute, "strategy": strategy},
            recovery={"backoff_seconds": 0},
        )

    return make


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.long), "fsdp"])
def test_two_killed_ranks_end_with_the_same_average(make_bench, tmp_path, monkeypatch, strategy):
    whole, killed = make_bench("whole", strategy), make_bench("killed", strategy)
    assert step.run(whole.config, whole.data).attempts == 1

    pause = Pause(tmp_path / "pause", 0)
    pause.set_everywhere(monkeypatch)
    sinks = [KillsRankOnce(killed.workspace, 1, pause)]
    outcome = step.run(killed.config, killed.data, sinks=sinks)

    assert (outcome.outcome, outcome.attempts) == ("finished", 2)
    assert weights_digest(killed.workspace) == weights_digest(whole.workspace)
    same_state(killed.workspace, whole.workspace)


FAILING = """
from steadytrain.components.techniques.base import TrainingComponent


class Plugin(TrainingComponent):
    def after_update(self, update):
        if update.step == 3:
            raise ConnectionError("Connection refused")
"""


def test_failing_component_ends_the_run_as_a_user_bug(make_bench, tmp_path, monkeypatch):
    folder = str(write_plugin(tmp_path / "failing", plugins.COMPONENTS, "failing", FAILING))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{os.environ['PYTHONPATH']}")
    bench = make_bench("failing", ranks=1, components={"failing": {}})

    with pytest.raises(TrainingFailed, match="'failing' failed in after_update") as caught:
        step.run_stage(bench.config, bench.data)

    assert caught.value.failure_class == "user_bug"
    assert "ConnectionError: Connection refused" in str(caught.value)
    assert 'failing_package.py", line 8, in after_update' in str(caught.value)
    assert "fix the error; the traceback shows where" in caught.value.remedy
    assert attempts(bench.workspace) == 1


LEAKING = """
import logging
import os
import subprocess
import sys
from steadytrain.components.techniques.base import TrainingComponent


class Plugin(TrainingComponent):
    def after_update(self, update):
        if update.step == 3:
            print(dict(os.environ), flush=True)
            logging.getLogger().error("connecting with %s", os.environ["PGPASSWORD"])
            print(os.environ["OTEL_EXPORTER_OTLP_HEADERS"].partition("=")[2], end="")
            subprocess.run([sys.executable, "-c", "import os; print(os.environ)"], check=True)
            os.write(2, os.environb[b"DB_PASS"] + b" and \\xff bytes that are not UTF-8")
            raise RuntimeError(f"login {os.environ['DB_PASS']} refused: {dict(os.environ)}")
"""
SECRETS = {
    "OTEL_EXPORTER_OTLP_HEADERS": "api-key=c4n4ry-0-value",
    "PGPASSWORD": "c4n4ry-1-value",
    "DB_PASS": "c4n4ry/2+value=",
    "SOMETHING_ELSE": "c4n4ry 3 'value'",
}


def test_nothing_that_a_failed_run_leaves_shows_a_value_of_its_environment(
    make_bench, tmp_path, monkeypatch
):
    folder = str(write_plugin(tmp_path / "leaking", plugins.COMPONENTS, "leaking", LEAKING))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{os.environ['PYTHONPATH']}")
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    bench = make_bench("leaking", components={"leaking": {}})

    with pytest.raises(TrainingFailed, match=r"login \[redacted\] refused"):
        step.run_stage(bench.config, bench.data)

    files = [path for path in (tmp_path / "output").rglob("*") if path.is_file()]
    assert [path for path in files if b"c4n4ry" in path.read_bytes()] == []
    logs = [path for path in files if path.name in ("rank-0.log", "rank-1.log", "log")]
    assert any(b"\xff bytes" in path.read_bytes() for path in logs)
    assert {path.stat().st_mode & 0o077 for path in logs} == {0}


def test_run_is_not_continued_with_other_components(make_bench):
    bench = make_bench("run", ranks=1, max_steps=2)
    assert step.run(bench.config, bench.data).succeeded
    other = make_bench("run", ranks=1, max_steps=2, components={})

    with pytest.raises(ValueError, match=r"training.components .*'ema'.* -> \{\}"):
        step.run(other.config, other.data)

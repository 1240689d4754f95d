"""Training components and an order of another package in full runs that are killed."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from steadytrain.components.shared.config import load
from steadytrain.components.shared.errors import TrainingFailed
from steadytrain.components.shared.events.types import AttemptStarted, CheckpointSaved
from steadytrain.components.shared.records import DataRecord, GateRecord
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train import step
from steadytrain.components.train.checkpoint.store import committed

from support.command import TINY_LM, wait_for
from support.plugins import install_example
from support.ranks import ranks_of
from support.training import Bench, events_of, weights_digest

COMPONENTS = {"ema": {"decay": 0.9}, "grad_norms": {}}
ADDED = (
    f"training.components={json.dumps(COMPONENTS)}",
    "training.order=shortest_first",
    "training.max_steps=40",
    "training.save_steps=4",
    "training.eval_steps=20",
    "recovery.backoff_seconds=0",
)
RECIPE = {
    "max_steps": 60,
    "global_batch_size": 4,
    "micro_batch_size": 2,
    "learning_rate": 5e-3,
    "eval_steps": 20,
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


def test_whole_pipeline_that_is_killed_ends_with_the_same_average(steadytrain, site, monkeypatch):
    workspace = Workspace(steadytrain.output, "killed")
    running = subprocess.Popen(
        steadytrain.line(
            *("run", "causal-lm", "--output", steadytrain.output),
            sets=(*TINY_LM, *ADDED, "run=killed"),
        ),
        cwd=steadytrain.output.parent,
        env=steadytrain.environment(PYTHONPATH=str(site)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for(lambda: committed(workspace.checkpoints) or running.poll() is not None, 600)
    (rank,) = ranks_of(workspace.attempts / "0001")
    rank.kill()
    out, _ = running.communicate(timeout=800)
    assert running.returncode == 0, out
    assert attempts(workspace) == 2
    assert GateRecord.load(workspace.record("gate")).promoted
    norms = json.loads((workspace.folder / "grad-norms.json").read_text())["norms"]
    assert len(norms) == 40

    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config = load(workspace.config, ["run=whole"])
    assert step.run(config, DataRecord.load(workspace.record("preprocess"))).attempts == 1
    undisturbed = Workspace.of(config)
    assert weights_digest(workspace) == weights_digest(undisturbed)
    same_state(workspace, undisturbed)


class KillsRankOnce:
    """Kills a rank at the run's first checkpoint."""

    def __init__(self, workspace, rank):
        self.workspace, self.rank, self.done = workspace, rank, False

    def emit(self, event):
        if isinstance(event, CheckpointSaved) and not self.done:
            self.done = True
            ranks_of(self.workspace.attempts / f"{event.attempt:04d}")[self.rank].kill()

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


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_that_are_killed_end_with_the_same_average(make_bench, strategy):
    whole, killed = make_bench("whole", strategy), make_bench("killed", strategy)
    assert step.run(whole.config, whole.data).attempts == 1

    outcome = step.run(killed.config, killed.data, sinks=[KillsRankOnce(killed.workspace, rank=1)])

    assert (outcome.outcome, outcome.attempts) == ("finished", 2)
    assert weights_digest(killed.workspace) == weights_digest(whole.workspace)
    same_state(killed.workspace, whole.workspace)


def test_component_that_fails_ends_the_run_as_a_bug_of_the_user(make_bench, site):
    (site / "steadytrain_example" / "failing.py").write_text("""
from steadytrain.components.train.loop.training_component import TrainingComponent


class Failing(TrainingComponent):
    def after_update(self, update):
        if update.step == 3:
            raise ConnectionError("Connection refused")
""")
    entries = next(site.glob("*.dist-info")) / "entry_points.txt"
    group = "[steadytrain.training_components]\n"
    added = f"{group}failing = steadytrain_example.failing:Failing\n"
    entries.write_text(entries.read_text().replace(group, added))
    bench = make_bench("failing", ranks=1, components={"failing": {}})

    with pytest.raises(TrainingFailed, match="'failing' failed in after_update") as caught:
        step.run_stage(bench.config, bench.data)

    assert caught.value.failure_class == "user_bug"
    assert "ConnectionError: Connection refused" in str(caught.value)
    assert 'failing.py", line 8, in after_update' in str(caught.value)
    assert "fix the error; the traceback shows where" in caught.value.remedy
    assert attempts(bench.workspace) == 1


def test_run_is_not_continued_with_other_components(make_bench):
    bench = make_bench("run", ranks=1, max_steps=2)
    assert step.run(bench.config, bench.data).succeeded
    other = make_bench("run", ranks=1, max_steps=2, components={})

    with pytest.raises(ValueError, match=r"training.components .*'ema'.* -> \{\}"):
        step.run(other.config, other.data)

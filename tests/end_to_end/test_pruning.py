"""A pruned run keeps a checkpoint of the step that its ranks agreed on, and can be continued."""

from __future__ import annotations

import pytest

from steadytrain.components.shared.errors import Pruned
from steadytrain.components.shared.events.types import AttemptEnded, StepFailed
from steadytrain.components.train.checkpoint import checkpoints_of
from steadytrain.components.train.checkpoint.store import committed
from steadytrain.components.train.step import run_stage
from steadytrain.pipelines import run

from support.command import TINY_LM
from support.pause import Pause
from support.snippets import blocks
from support.training import Bench, events_of

pytestmark = pytest.mark.long
RECIPE = {
    "max_steps": 24,
    "global_batch_size": 4,
    "micro_batch_size": 2,
    "learning_rate": 5e-3,
    "eval_steps": 8,
    "save_steps": 24,
    "logging_steps": 1,
}


def pause_until_stopped(folder, monkeypatch):
    """Pause ranks at a validation, at a step that is set later, until they are asked to stop."""
    pause = Pause(folder / "pause", 0, "Validated", stoppable=True)
    pause.set(None)
    pause.set_everywhere(monkeypatch)
    return pause


@pytest.mark.parametrize("ranks", [1, 2])
def test_pruned_run_continues_to_the_weights_of_an_undisturbed_one(
    tmp_path, data, monkeypatch, ranks
):
    def bench(name):
        compute = {"device": "cpu", "nproc_per_node": ranks, "threads_per_rank": 1}
        return Bench.make(tmp_path / name, data, training=RECIPE, compute=compute)

    undisturbed, trial = bench("undisturbed"), bench("trial")
    expected = run_stage(undisturbed.config, undisturbed.data)

    scores = []
    pause_until_stopped(tmp_path, monkeypatch).set(8)
    with pytest.raises(Pruned) as caught:
        run_stage(
            trial.config,
            trial.data,
            on_validation=lambda event: scores.append(event.metrics["loss"]) or event.step < 8,
        )
    *_, kept = committed(checkpoints_of(trial.config))
    assert 8 <= kept.step == caught.value.step < 24
    assert kept.verify().world_size == ranks
    (attempt,) = events_of(trial.workspace, AttemptEnded)
    assert (attempt.outcome, attempt.step) == ("pruned", kept.step)
    assert events_of(trial.workspace, StepFailed)[-1].error == "Pruned"
    assert scores
    assert not trial.workspace.model.exists()
    assert not trial.workspace.record("train").exists()

    record = run_stage(trial.config, trial.data)
    assert record.attempts == 2
    assert record.weights_digest == expected.weights_digest


def test_documented_search_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (block,) = (item for item in blocks("python") if "def search(" in item.text)
    names = {}
    exec(block.text, names)
    output, told = tmp_path / "output", []
    pause = pause_until_stopped(tmp_path, monkeypatch)
    times = ("training.max_steps=40", "training.eval_steps=10", "training.save_steps=40")
    sets = (*TINY_LM, *times, f"output={output}")

    def noted(config, **how):
        if told:
            pause.set(10)
        told.append((config, run(config, **how)))
        return told[-1][1]

    names["run"] = noted
    assert names["search"]([1e-2, 1e-9], sets) == 1e-2
    (_, done), (worse, pruned) = told
    assert done.outcome == "finished"
    assert done.registration.champion
    assert pruned.outcome == "pruned"
    assert (pruned.train, pruned.registration) == (None, None)
    page = output / "runs" / worse.run_id / "report.html"
    assert "was pruned in train" in page.read_text()

    continued = run(worse)
    assert (continued.outcome, continued.step) == ("finished", 40)
    assert continued.train.attempts == 2
    assert not continued.gate.promoted
    assert not continued.registration.champion

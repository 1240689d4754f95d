"""Which model a training run ends with: the best by validation, unless configured otherwise."""

from __future__ import annotations

import pytest
import torch

from steadytrain.components.shared.events.types import Validated, Warned
from steadytrain.components.train.checkpoint.store import CheckpointStore, committed

from support.training import events_of, exported, losses_of, result_of

OVERFITS = {
    "max_steps": 40,
    "learning_rate": 0.05,
    "lr_scheduler_type": "constant",
    "eval_steps": 2,
    "save_steps": 50,
    "save_total_limit": 1,
}


@pytest.mark.slow
def test_best_model_is_kept_and_exported(make_bench):
    bench = make_bench(rows=4, training=OVERFITS)

    bench.train_here()

    result = result_of(bench)
    scores = {event.step: event.metrics["loss"] for event in events_of(bench.workspace, Validated)}
    assert result.best_step == min(scores, key=scores.__getitem__) < 40
    assert result.best_score == min(scores.values())
    kept = {path.name for path in committed(bench.workspace.checkpoints)}
    assert kept == {f"step-{result.best_step:08d}", "step-00000040"}
    best = (
        CheckpointStore(bench.workspace.checkpoints, keep=9).path(result.best_step).tensors("model")
    )
    assert all(torch.equal(best[name], value) for name, value in exported(bench).items())


@pytest.mark.slow
def test_last_model_is_exported_on_request(make_bench):
    bench = make_bench(rows=4, training={**OVERFITS, "load_best_model_at_end": False})

    bench.train_here()

    result = result_of(bench)
    assert result.best_step == 40
    assert result.best_score == events_of(bench.workspace, Validated)[-1].metrics["loss"]
    last = CheckpointStore(bench.workspace.checkpoints, keep=9).path(40).tensors("model")
    assert all(torch.equal(last[name], value) for name, value in exported(bench).items())


@pytest.mark.slow
def test_lost_best_checkpoint_leaves_the_last_model_with_a_warning(make_bench, monkeypatch):
    bench = make_bench(rows=4, training=OVERFITS)
    from steadytrain.components.train.loop.training import Training

    run = Training.run

    def run_then_damage(self):
        outcome = run(self)
        folder = self.store.path(self.progress.best_step).storage.folder
        (best,) = folder.glob("*.model.safetensors")
        best.write_bytes(best.read_bytes()[:-1])
        return outcome

    monkeypatch.setattr(Training, "run", run_then_damage)

    bench.train_here()

    assert "model.safetensors" in events_of(bench.workspace, Warned)[0].message
    assert result_of(bench).best_step == 40


@pytest.mark.slow
def test_early_stopping_ends_with_the_best_model(make_bench):
    bench = make_bench(rows=4, training={**OVERFITS, "early_stopping_patience": 3})

    training = bench.train_here()

    result = result_of(bench)
    assert result.outcome == "early_stopped"
    assert result.best_step == result.step - 6 == training.progress.best_step
    assert (bench.workspace.model / "config.json").is_file()


def test_without_validation_the_last_loss_is_the_score(make_bench):
    bench = make_bench(held_out=0)

    bench.train_here()

    result = result_of(bench)
    assert (result.metric, result.best_step) == ("training_loss", 6)
    assert result.best_score == pytest.approx(losses_of(bench.workspace)[6])


@pytest.mark.parametrize(
    ("settings", "chosen"),
    [
        ({"metric_for_best_model": "eval_perplexity", "greater_is_better": False}, "perplexity"),
        ({"metric_for_best_model": "perplexity"}, "perplexity"),
    ],
)
def test_another_metric_may_choose_the_best_model(make_bench, settings, chosen):
    bench = make_bench(training=settings)

    bench.train_here()

    scores = {event.step: event.metrics[chosen] for event in events_of(bench.workspace, Validated)}
    assert result_of(bench).metric == chosen
    assert result_of(bench).best_step == min(scores, key=scores.__getitem__)

"""Plugins of another package in full runs, one of which is killed; no product code names them."""

from __future__ import annotations

import json

import psutil
import pytest

from steadytrain.components.shared.records import EvaluationRecord, GateRecord, TrainRecord
from steadytrain.components.train.checkpoint.store import committed

from support.command import TINY_LM, paused_rank
from support.plugins import install_example

STEPS = 40
SETS = (
    *TINY_LM,
    "training.optim=my_lion",
    "training.lr_scheduler_type=trapezoid",
    "training.learning_rate=1e-3",
    "training.order=shortest_first",
    "training.components={ema: {decay: 0.9}, grad_norms: {}}",
    f"training.max_steps={STEPS}",
    "training.save_steps=2",
    f"training.eval_steps={STEPS}",
    "gate.metric=median_loss",
    "gate.floors={median_loss: 1.0e6}",
    "tracking.sinks=[event_counts, mlflow, never_opens]",
    # Otherwise the second run takes the first one's model.
    "recovery.reuse_ttl_seconds=0",
)
PLUGINS = (
    "my_lion in steadytrain.optimizers",
    "trapezoid in steadytrain.schedules",
    "shortest_first in steadytrain.orders",
    "ema, grad_norms in steadytrain.training_components",
    "median_loss in steadytrain.metrics",
    "event_counts, never_opens in steadytrain.sinks",
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    return {"PYTHONPATH": str(install_example(tmp_path_factory.mktemp("example")))}


def record(folder, name, kind):
    return kind.load(folder / "records" / f"{name}.json")


def kill(steadytrain, run, sets, installed):
    """Start a run, and kill its command at the first checkpoint."""
    pause = steadytrain.pause(0)
    paths = (installed["PYTHONPATH"], pause.everywhere["PYTHONPATH"])
    variables = {**pause.everywhere, "PYTHONPATH": ":".join(paths)}
    program = steadytrain.start("causal-lm", *sets, **variables)
    paused_rank(pause, program)
    others = psutil.Process(program.pid).children(recursive=True)
    program.kill()
    program.communicate()
    # They die with the command, and hold the run until then.
    assert not psutil.wait_procs(others, 300)[1]
    assert not (run / "records" / "train.json").exists()


@pytest.mark.long
def test_killed_run_with_plugins_of_many_kinds_ends_as_an_undisturbed_one(steadytrain, installed):
    first = steadytrain.run("causal-lm", *SETS, "run=whole", **installed)
    assert first.code == 0, first.out + first.err
    assert "the sink 'never_opens' failed" in first.out + first.err
    whole, killed = (steadytrain.output / "runs" / name for name in ("whole", "killed"))
    evaluation = record(whole, "evaluate", EvaluationRecord)
    median = evaluation.metrics["median_loss"]
    assert median.low <= median.value <= median.high
    assert evaluation.metrics["bits_per_token"].value == pytest.approx(
        evaluation.metrics["loss"].value / 0.6931471805599453
    )
    assert record(whole, "gate", GateRecord).promoted
    counts = json.loads((whole / "event-counts.json").read_text())
    assert counts["TrainingStep"] == STEPS

    again = (*SETS, "run=killed")
    kill(steadytrain, killed, again, installed)
    second = steadytrain.run("causal-lm", *again, **installed)

    assert second.code == 0, second.out + second.err
    assert record(killed, "train", TrainRecord).attempts > 1
    files = [(run / "model" / "model.safetensors").read_bytes() for run in (whole, killed)]
    assert files[0] == files[1]
    assert_same_state(whole, killed)

    short = steadytrain.run("causal-lm", *SETS, "training.max_steps=4", "run=short", **installed)
    assert short.code == 0, short.out + short.err
    decision = record(steadytrain.output / "runs" / "short", "gate", GateRecord)
    assert (decision.metric, decision.champion) == ("median_loss", median.value)
    assert f"median loss {decision.candidate:.4g} against {median.value:.4g}" in short.out


def assert_same_state(whole, killed):
    one, other = (committed(run / "checkpoints")[-1] for run in (whole, killed))
    for part in ("model", "optimizer", "component-ema"):
        tensors, others = one.tensors(part), other.tensors(part)
        assert tensors.keys() == others.keys()
        assert all(tensors[name].equal(others[name]) for name in tensors), part
    assert one.state()["components"] == other.state()["components"]
    norms = [json.loads((run / "grad-norms.json").read_text())["norms"] for run in (whole, killed)]
    assert len(norms[0]) == STEPS
    assert norms[0] == norms[1]


def test_every_missing_plugin_is_reported(steadytrain):
    without = steadytrain.run("causal-lm", *SETS)
    assert without.code == 2
    assert "use one of adafactor, adam, adamw_bnb_8bit, adamw_torch, " in without.err
    assert "install the package" in without.err
    for plugin in PLUGINS:
        assert plugin in without.err

"""Averages of the weights: those of torch, resumed exactly, and exported if they are better."""

from __future__ import annotations

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.effects import Use
from steadytrain.components.shared.errors import BadInput, ConfigError
from steadytrain.components.shared.events.types import Validated
from steadytrain.components.techniques.averaging import AveragingConfig
from steadytrain.components.techniques.averaging.weights import WeightAverage
from steadytrain.components.techniques.base import TrainingContext, Update
from steadytrain.components.train.checkpoint import Checkpoint

from support.training import LLAMA, events_of, exported, result_of, weights_digest

MINIMAL = {"name": "tiny", "data": {"source": ["x"]}, "model": {"config": LLAMA}}
STEPS = 12
EACH_STEP = {"save_steps": 1, "save_total_limit": 9, "eval_steps": 2}
PART = "component-training.averaging"


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("start", [0, 4])
@pytest.mark.parametrize(
    ("settings", "function"),
    [
        ({"kind": "ema", "decay": 0.9, "warmup": False}, get_ema_multi_avg_fn(0.9)),
        ({"kind": "swa"}, get_swa_multi_avg_fn()),
    ],
    ids=["ema", "swa"],
)
def test_average_is_that_of_swa_utils(tmp_path, settings, function, start, every):
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    theirs = AveragedModel(model, multi_avg_fn=function)
    config = AveragingConfig(**settings, every=every)
    ours = WeightAverage(config, start)
    weights = {name: item.detach() for name, item in model.named_parameters()}
    ours.begin(TrainingContext(weights, 0, 1, tmp_path, 1, False, dict, print))
    for step in range(1, STEPS + 1):
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight))
        ours.after_update(Update(step, 0.0, 0.0, 0.0))
        if step > start and (step - start) % every == 0:
            theirs.update_parameters(model)
    for name, average in theirs.module.named_parameters():
        assert ours.tensors()["average"][name].equal(average), name


def test_decay_warms_up(tmp_path):
    weight = torch.zeros(1)
    ours = WeightAverage(AveragingConfig(kind="ema", decay=0.5), 0)
    ours.begin(TrainingContext({"w": weight}, 0, 1, tmp_path, 1, False, dict, print))
    found, expected = [], 0.0
    for number in range(20):
        weight.fill_(number)
        ours.after_update(Update(number + 1, 0.0, 0.0, 0.0))
        share = min(0.5, (1 + number) / (10 + number)) if number else 0.0
        expected = share * expected + (1 - share) * number
        found.append((ours.tensors()["average"]["w"].item(), expected))
    assert all(one == pytest.approx(other) for one, other in found)


def checkpoint(bench, step):
    return Checkpoint.at(bench.workspace.checkpoints / f"step-{step:08d}")


def averaging(**settings):
    given = {"kind": "ema", **settings}
    own = {"decay": 0.9} if given["kind"] == "ema" else {}
    return {"training": {**EACH_STEP, "averaging": {**own, **given}}}


@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_resumed_run_has_the_same_average(make_bench, kind):
    settings = averaging(kind=kind, start=1)
    whole, resumed = (make_bench(name, **settings) for name in ("whole", "resumed"))
    whole.train_here()
    resumed.train_here(1, resume_from=whole.workspace.checkpoints / "step-00000003")
    assert weights_digest(resumed.workspace) == weights_digest(whole.workspace)
    one, other = (checkpoint(bench, 6).tensors(PART) for bench in (whole, resumed))
    assert one.keys() == other.keys()
    assert all(one[name].equal(other[name]) for name in one)


@pytest.mark.parametrize("export", ["averaged", "raw", "best"])
def test_exported_weights_are_those_that_were_chosen(make_bench, export):
    bench = make_bench(**averaging(export=export))
    training = bench.train_here()
    chosen, model = training.best(), exported(bench)
    saved = checkpoint(bench, chosen.step)
    average, weights = saved.tensors(PART), saved.tensors("model")
    expected = {
        name: average[f"{name}/average"] if chosen.averaged else weights[name] for name in model
    }
    assert all(tensor.equal(expected[name]) for name, tensor in model.items())
    scores = {}
    for event in events_of(bench.workspace, Validated):
        scores[event.step] = event.metrics["loss"], event.metrics["averaged_loss"]
    raw, averaged = scores[chosen.step]
    assert raw != averaged
    assert (
        result_of(bench).best_score
        == {
            "averaged": min(pair[1] for pair in scores.values()),
            "raw": min(pair[0] for pair in scores.values()),
            "best": min(min(pair) for pair in scores.values()),
        }[export]
    )
    if export != "best":
        assert chosen.averaged == (export == "averaged")


def test_scores_from_before_the_average_do_not_count_if_only_it_is_exported(make_bench):
    """The weights of an early step may be better than any average."""
    rising = {"learning_rate": 1.0, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 7}
    settings = averaging(export="averaged", start=4)
    bench = make_bench(training={**settings["training"], **rising, "max_steps": 8})
    training = bench.train_here()
    metrics = {event.step: event.metrics for event in events_of(bench.workspace, Validated)}
    averaged = {step: item["averaged_loss"] for step, item in metrics.items() if step > 4}
    assert metrics[2]["loss"] < min(averaged.values())
    chosen = training.best()
    assert (chosen.averaged, chosen.score) == (True, min(averaged.values()))


def test_average_that_never_begins_is_rejected_once_the_steps_are_known(make_bench):
    epochs = {"max_steps": -1, "num_train_epochs": 1}
    bench = make_bench(training={**averaging(start=5, every=6)["training"], **epochs})
    with pytest.raises(BadInput, match="first averaged step would be 11, and the run has 10"):
        bench.train_here()


@pytest.mark.slow
def test_averaging_changes_nothing_that_is_learned(make_bench):
    plain, averaged = make_bench("plain", training=EACH_STEP), make_bench("av", **averaging())
    plain.train_here()
    averaged.train_here()
    one, other = (checkpoint(bench, 6).tensors("model") for bench in (plain, averaged))
    assert all(one[name].equal(other[name]) for name in one)


@pytest.mark.parametrize(
    ("training", "problem"),
    [
        (
            {"averaging": {"kind": "swa", "start": 9}, "max_steps": 9},
            r"averaging\.start = 9\.0: training\.max_steps is 9, so nothing would be averaged",
        ),
        (
            {"averaging": {"kind": "ema", "start": 0.5, "every": 6}, "max_steps": 11},
            r"averaging\.every = 6: training\.max_steps is 11, so nothing would be averaged",
        ),
        ({"averaging": {"kind": "swa", "decay": 0.5}}, r"averaging\.decay.*kind is swa\n.*to ema"),
        ({"averaging": {"start": 3}}, r"averaging\.start.*kind is none\n.*to ema or swa"),
        (
            {
                "averaging": {"kind": "ema"},
                "optim": "schedule_free_adamw",
                "lr_scheduler_type": "constant",
            },
            "it averages the weights itself, and training.averaging.kind is ema",
        ),
    ],
)
def test_averaging_that_cannot_work_is_rejected(training, problem):
    with pytest.raises(ConfigError, match=problem):
        from_mapping({**MINIMAL, "training": training})


def test_average_is_in_the_plan_and_in_the_identity_only_if_there_is_one():
    plain = from_mapping(MINIMAL)
    averaged = from_mapping({**MINIMAL, "training": {"averaging": {"kind": "ema"}}})
    assert (plain.training.weight_copies, averaged.training.weight_copies) == (0, 1)
    assert "averaging" not in plain.counted(Use.TRAINING)["training"]
    assert plain.digest() != averaged.digest()

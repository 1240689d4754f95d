"""Several data sets in full runs: killed and resumed, on two ranks, in smaller micro-batches."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from steadytrain.components.shared.events.types import Validated

from support import selected
from support.task_data import STILL, data_of
from support.training import events_of, losses_of, weights_digest
from support.whole_runs import RECIPE, run

WEIGHTS = {"mood": 1.0, "topic": 3.0}
MIXED = {
    "fixed": {"sampling": "weights", "sampling_weights": WEIGHTS, "loss_weights": WEIGHTS},
    "uncertainty": {"sampling": "temperature", "loss_weighting": "uncertainty"},
}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Return the data of two parts, the sections of runs by loss weighting, and the runs."""
    root = tmp_path_factory.mktemp("mixed")
    data = data_of("multi_task", root / "data")
    recipe = {**RECIPE, "global_batch_size": 8, "micro_batch_size": 4}
    sections = {
        kind: {"training": {**recipe, "multi_task": MIXED[kind]}, "model": {"config": STILL}}
        for kind in MIXED
    }
    return data, sections, {kind: run(root / kind, data, sections[kind]) for kind in MIXED}


@pytest.mark.parametrize("kind", MIXED)
def test_killed_mixture_ends_with_the_same_weights(tmp_path, mixed, kind):
    data, sections, whole = mixed
    killed = run(tmp_path, data, sections[kind], killed=True)
    assert weights_digest(killed) == weights_digest(whole[kind])
    assert events_of(killed, Validated)[-1].metrics == events_of(whole[kind], Validated)[-1].metrics


def test_loss_weights_are_learned_and_not_exported(mixed):
    _, _, whole = mixed
    first, *_, last = [event.metrics for event in events_of(whole["uncertainty"], Validated)]
    for part in WEIGHTS:
        assert first[f"{part}_loss_weight"] != last[f"{part}_loss_weight"]
    model = whole["uncertainty"].model / "model.safetensors"
    assert not any("uncertainty" in name for name in load_file(model))


@selected.each("shards", ["ddp", "fsdp", "zero2", "zero3"], few=["fsdp"])
@pytest.mark.parametrize("kind", MIXED)
def test_two_ranks_learn_the_same_parts_and_resume_exactly(tmp_path, mixed, kind, shards):
    data, sections, whole = mixed
    on_two = {"ranks": 2, "strategy": shards}
    shared = run(tmp_path / "whole", data, sections[kind], **on_two)
    killed = run(tmp_path / "killed", data, sections[kind], **on_two, killed=True)
    assert weights_digest(killed) == weights_digest(shared)
    assert losses_of(shared) == pytest.approx(losses_of(whole[kind]), rel=1e-4)
    for ours, theirs in zip(
        events_of(shared, Validated), events_of(whole[kind], Validated), strict=True
    ):
        assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-4)


@pytest.mark.parametrize("kind", MIXED)
def test_smaller_micro_batches_learn_the_same_parts(tmp_path, mixed, kind):
    data, sections, whole = mixed
    halved = {**sections[kind], "training": {**sections[kind]["training"], "micro_batch_size": 2}}
    assert losses_of(run(tmp_path, data, halved)) == pytest.approx(losses_of(whole[kind]), rel=1e-5)

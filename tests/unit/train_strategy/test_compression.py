"""Compressed gradients of two ranks: close to complete ones, and resumed with what was carried."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file

from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.errors import ConfigError
from steadytrain.components.train.checkpoint import Checkpoint

from support.forked import on_ranks
from support.selected import each
from support.strategies import MIDDLE, RECIPE, STEPS, Case, go_on, middle, on_two_ranks
from support.training import LLAMA

MINIMAL = {"name": "tiny", "data": {"source": ["x"]}, "model": {"config": LLAMA}}
KINDS = {
    "plain": {},
    "bf16": {"kind": "bf16"},
    "powersgd": {"kind": "powersgd", "rank": 1, "start": 4},
    # No matrix of the model gets smaller with this rank.
    "full": {"kind": "powersgd", "rank": 64, "start": 4},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("compression")


@pytest.fixture(scope="module")
def losses(folder):
    """Train on two ranks with each kind; return the losses by kind, training run and step."""
    cases = [
        Case(
            name,
            "ddp",
            "plain/whole",
            sections={"training": {**RECIPE, "gradient_compression": settings}},
            resumes=name in ("bf16", "powersgd"),
        )
        for name, settings in KINDS.items()
    ]
    return on_two_ranks(folder, cases, "")


@pytest.mark.slow
def test_compressed_gradients_learn_about_the_same(losses):
    plain = losses["plain"]["whole"]
    assert losses["full"]["whole"] == pytest.approx(plain, rel=1e-4)
    for kind, tolerance in (("bf16", 0.01), ("powersgd", 0.2)):
        found = losses[kind]["whole"]
        assert found != plain
        assert found == pytest.approx(plain, rel=tolerance)
    # The first steps exchange complete gradients.
    first = {step: loss for step, loss in plain.items() if int(step) <= KINDS["powersgd"]["start"]}
    assert {step: losses["powersgd"]["whole"][step] for step in first} == first


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bf16", "powersgd"])
def test_resumed_run_has_the_same_bits(losses, folder, kind):
    whole = losses[kind]["whole"]
    assert losses[kind]["resumed"] == {n: x for n, x in whole.items() if int(n) > MIDDLE}
    one, other = (
        load_file(folder / kind / run / "runs/tiny/model/model.safetensors")
        for run in ("whole", "resumed")
    )
    assert all(one[name].equal(other[name]) for name in one)


@pytest.mark.slow
def test_each_rank_saves_the_error_that_it_carries(losses, folder):
    saved = Checkpoint.at(middle(folder / "powersgd" / "whole"))
    tensors = saved.tensors("compression")
    errors = [name for name in tensors if name.startswith("error-")]
    assert errors == [name for name in errors if tensors[name].any()]
    first, second = (
        [tensors[name] for name in errors if name.startswith(f"error-{rank}-")] for rank in (0, 1)
    )
    assert len(first) == len(second) > 0
    assert not any(one.equal(other) for one, other in zip(first, second, strict=True))
    assert saved.state()["compression"] == {"iteration": MIDDLE, "world_size": 2}


@pytest.mark.slow
@each("ranks", [1, 2, 4], few=[4])
def test_other_ranks_start_without_what_these_carried(losses, folder, tmp_path, ranks):
    """One rank is what two nodes with a rank each leave when a node is lost."""
    powersgd = {"training": {**RECIPE, "gradient_compression": KINDS["powersgd"]}}
    if ranks == 1:
        powersgd["compute"] = {"nodes": 2, "nproc_per_node": 1, "device": "cpu"}
        powersgd["recovery"] = {"min_nodes": 1}
    on_ranks(ranks, go_on, tmp_path, middle(folder / "powersgd" / "whole"), powersgd)
    found = json.loads((tmp_path / "found.json").read_text())
    whole = {step: loss for step, loss in losses["powersgd"]["whole"].items() if int(step) > MIDDLE}
    if ranks == 2:
        assert any(name.startswith("error-0-") for name in found["tensors"])
        assert found["losses"] == whole
        return
    assert found["tensors"] == []
    # The weights continue; PowerSGD's steps do too, so it compresses at once.
    first = str(MIDDLE + 1)
    assert found["losses"][first] == pytest.approx(whole[first], rel=1e-5)
    assert found["losses"] == pytest.approx(whole, rel=0.2)
    assert found["losses"] != whole
    assert found["settings"] == (None if ranks == 1 else {"iteration": MIDDLE, "world_size": ranks})
    if ranks > 1:
        last = Checkpoint.at(tmp_path / "runs/tiny/checkpoints" / f"step-{STEPS:08d}")
        carried = {name.rpartition("-")[0] for name in last.tensors("compression")}
        assert carried == {"p", "q", *(f"error-{rank}" for rank in range(ranks))}


@pytest.mark.parametrize(
    ("settings", "compute", "problem"),
    [
        ({"kind": "bf16"}, {"strategy": "fsdp", "nproc_per_node": 2}, "only DDP exchanges"),
        ({"kind": "bf16"}, {"nproc_per_node": 1}, "one rank exchanges no gradients"),
        ({"kind": "bf16", "rank": 2}, {"nproc_per_node": 2}, "with kind bf16, nothing reads it"),
        (
            {"kind": "powersgd", "start": 9},
            {"nproc_per_node": 2},
            "max_steps is 9, so nothing would be compressed",
        ),
    ],
)
def test_compression_that_cannot_work_is_rejected(settings, compute, problem):
    training = {"gradient_compression": settings, "max_steps": 9}
    with pytest.raises(ConfigError, match=problem):
        from_mapping({**MINIMAL, "training": training, "compute": compute})


def test_out_of_memory_does_not_shard_compressed_gradients():
    training, compute = {"gradient_compression": {"kind": "bf16"}}, {"nproc_per_node": 2}
    config = from_mapping({**MINIMAL, "training": training, "compute": compute})
    assert config.conflict_with("fsdp").startswith("training.gradient_compression: only DDP")
    assert not config.conflict_with("ddp")
    plain = from_mapping({**MINIMAL, "compute": compute})
    assert config.digest() != plain.digest()
    powersgd = {"gradient_compression": {"kind": "powersgd"}}
    counted = from_mapping({**MINIMAL, "training": powersgd, "compute": compute})
    assert (plain.training.weight_copies, counted.training.weight_copies) == (0, 1)

"""Every strategy matches the losses of a single rank and reads checkpoints of the others."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from safetensors.torch import load_file

from steadytrain.components.train.checkpoint import Checkpoint

from support import selected
from support.plugins import install_example
from support.strategies import MIDDLE, STEPS, Case, middle, on_two_ranks, train

ADAPTED = ("lora", "lora-fsdp", "lora-zero3")
CASES = [
    *(Case(name, name, "single") for name in ("ddp", "fsdp", "zero1", "zero2", "zero3")),
    Case("plugin", "fsdp_keep", "single"),
    *(Case(name, name.partition("-")[2] or "ddp", "single-lora", bucket=2000) for name in ADAPTED),
    Case("zero3-small-bucket", "zero3", "single", bucket=2000),
]
BY_NAME = {case.name: case for case in CASES}
each = selected.each("name", BY_NAME, few=("ddp", "fsdp", "zero3"))


def sections(root, name):
    """Return the configuration sections besides the recipe."""
    if name not in (*ADAPTED, "single-lora"):
        return {}
    adapter = {"kind": "lora", "rank": 4, "dropout": 0.0}
    return {"model": {"base": str(root / "single" / "runs/tiny/model"), "adapter": adapter}}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("strategies")


@pytest.fixture(scope="module")
def alone(root):
    """Return the losses by step of a single rank, for full training and for adapters."""
    return {name: train(root / name, **sections(root, name)) for name in ("single", "single-lora")}


@pytest.fixture(scope="module")
def ended(request, root, alone):
    """Run the strategies on two ranks; return the losses by case, training run and step."""
    names = {"fsdp"} | selected.selected(request, "name")
    cases = [replace(BY_NAME[name], sections=sections(root, name)) for name in sorted(names)]
    found = on_two_ranks(root, cases, install_example(root / "example"))
    return {
        name: {kind: by_step(told) for kind, told in kinds.items()} for name, kinds in found.items()
    }


def by_step(told):
    return {int(step): loss for step, loss in told.items()}


def after(losses, step):
    return {number: loss for number, loss in losses.items() if number > step}


@each
def test_losses_match_one_rank(name, ended, alone):
    assert ended[name]["whole"] == pytest.approx(alone[BY_NAME[name].single], rel=1e-4)


def test_training_reduces_the_loss(alone, root):
    losses = alone["single"]
    assert losses[STEPS] < 0.9 * losses[1]
    adapters = exported(root / "single-lora")
    assert all(tensor.any() for name, tensor in adapters.items() if "lora_B" in name)
    assert len(adapters) == 2 * 2 * 7  # two matrices for each of seven projections in two layers


@each
def test_each_strategy_resumes_exactly(name, ended, root):
    losses = ended[name]
    assert losses["resumed"] == after(losses["whole"], MIDDLE)
    whole, resumed = (exported(root / name / run) for run in ("whole", "resumed"))
    assert whole.keys() == resumed.keys()
    assert all(whole[key].equal(resumed[key]) for key in whole)


@each
def test_strategy_continues_from_a_checkpoint_of_one_rank(name, ended, alone):
    expected = after(alone[BY_NAME[name].single], MIDDLE)
    assert ended[name]["from_single"] == pytest.approx(expected, rel=1e-4)


@each
def test_one_rank_continues_from_the_strategys_checkpoint(name, ended, alone, root):
    folder = root / name
    losses = train(folder / "by-one", resume=middle(folder / "whole"), **sections(root, name))
    assert losses == pytest.approx(after(alone[BY_NAME[name].single], MIDDLE), rel=1e-4)


def test_one_rank_resumes_from_the_shards_of_two(ended, alone, root):
    """This happens if nodes are missing and the strategy doesn't change."""
    folder = root / "fsdp"
    losses = train(folder / "fewer", "fsdp", resume=middle(folder / "whole"))
    assert losses == pytest.approx(after(alone["single"], MIDDLE), rel=1e-4)


@each
def test_no_rank_writes_another_ranks_slice(name, ended, root):
    manifest = Checkpoint.at(middle(root / name / "whole")).verify()
    for entry in manifest.tensors:
        held = sum(math.prod(piece.shape) for piece in entry.slices)
        assert held == math.prod(entry.shape), entry.name


def exported(folder):
    (weights,) = (folder / "runs/tiny/model").glob("*.safetensors")
    return load_file(weights)

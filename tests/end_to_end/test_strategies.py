"""Every strategy matches the losses of a single rank and reads checkpoints of the others."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from safetensors.torch import load_file

from steadytrain.components.train.checkpoint import Checkpoint

from support.plugins import install_example
from support.strategies import MIDDLE, STEPS, Case, middle, on_two_ranks, train

ADAPTED = ("lora", "lora-fsdp", "lora-zero3")
CASES = [
    *(Case(name, name, "single") for name in ("ddp", "fsdp", "zero1", "zero2", "zero3")),
    Case("plugin", "fsdp_keep", "single"),
    *(Case(name, name.partition("-")[2] or "ddp", "single-lora", bucket=2000) for name in ADAPTED),
    Case("zero3-small-bucket", "zero3", "single", bucket=2000),
]


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
def ended(root, alone):
    """Run all strategies on two ranks; return the losses by case, training run and step."""
    cases = [replace(case, sections=sections(root, case.name)) for case in CASES]
    found = on_two_ranks(root, cases, install_example(root / "example"))
    return {
        name: {kind: by_step(told) for kind, told in kinds.items()} for name, kinds in found.items()
    }


def by_step(told):
    return {int(step): loss for step, loss in told.items()}


def after(losses, step):
    return {number: loss for number, loss in losses.items() if number > step}


def each(test):
    return pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])(test)


@each
def test_the_losses_are_those_of_one_rank(case, ended, alone):
    assert ended[case.name]["whole"] == pytest.approx(alone[case.single], rel=1e-4)


def test_something_is_learned(alone, root):
    losses = alone["single"]
    assert losses[STEPS] < 0.9 * losses[1]
    adapters = exported(root / "single-lora")
    assert all(tensor.any() for name, tensor in adapters.items() if "lora_B" in name)
    assert len(adapters) == 2 * 2 * 7  # two matrices for each of seven projections in two layers


@each
def test_it_resumes_exactly(case, ended, root):
    losses = ended[case.name]
    assert losses["resumed"] == after(losses["whole"], MIDDLE)
    whole, resumed = (exported(root / case.name / name) for name in ("whole", "resumed"))
    assert whole.keys() == resumed.keys()
    assert all(whole[name].equal(resumed[name]) for name in whole)


@each
def test_strategy_continues_from_a_checkpoint_of_one_rank(case, ended, alone):
    expected = after(alone[case.single], MIDDLE)
    assert ended[case.name]["from_single"] == pytest.approx(expected, rel=1e-4)


@each
def test_one_rank_continues_from_the_strategys_checkpoint(case, ended, alone, root):
    folder = root / case.name
    losses = train(folder / "by-one", resume=middle(folder / "whole"), **sections(root, case.name))
    assert losses == pytest.approx(after(alone[case.single], MIDDLE), rel=1e-4)


def test_what_two_ranks_have_shared_one_rank_has_alone(ended, alone, root):
    """This happens if nodes are missing and the strategy doesn't change."""
    folder = root / "fsdp"
    losses = train(folder / "fewer", "fsdp", resume=middle(folder / "whole"))
    assert losses == pytest.approx(after(alone["single"], MIDDLE), rel=1e-4)


@each
def test_no_rank_writes_what_another_one_has(case, ended, root):
    manifest = Checkpoint.at(middle(root / case.name / "whole")).verify()
    for entry in manifest.tensors:
        held = sum(math.prod(piece.shape) for piece in entry.slices)
        assert held == math.prod(entry.shape), entry.name


def exported(folder):
    (weights,) = (folder / "runs/tiny/model").glob("*.safetensors")
    return load_file(weights)

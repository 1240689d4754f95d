"""State with the shape of the weights is sharded with them, and survives as they do."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import Validated
from steadytrain.components.train.checkpoint import Checkpoint

from support import selected
from support.plugins import install_example
from support.strategies import MIDDLE, RECIPE, STEPS, Case, on_two_ranks
from support.training import LLAMA

DECAY = 0.9
# The rows of some weights do not divide by two ranks: FSDP pads them.
MODEL = {"model": {"config": {**LLAMA, "intermediate_size": 61}}}
# No checkpoint follows every second validation: saving, too, makes FSDP gather weights again.
EVERY = MIDDLE // 2
RUN = {**RECIPE, "eval_steps": EVERY, "load_best_model_at_end": False}
PLAIN = {**MODEL, "training": RUN}
COMPONENTS = {"ema": {"decay": DECAY}, "grad_norms": {}}
AVERAGED = {**MODEL, "training": {**RUN, "components": COMPONENTS}}
STRATEGIES = ("ddp", "fsdp", "zero1", "zero2", "zero3")
each = selected.each("name", STRATEGIES, few=("fsdp",))
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def root(request, tmp_path_factory):
    """Run the strategies on two ranks, each whole, resumed, and from the checkpoint of DDP."""
    folder = tmp_path_factory.mktemp("components")
    site = install_example(tmp_path_factory.mktemp("example"))
    # DDP comes first: the others start from its checkpoint.
    names = sorted({"ddp"} | selected.selected(request, "name"))
    cases = [
        *(Case(name, name, "ddp/whole", sections=AVERAGED) for name in names),
        *(Case(f"plain-{name}", name, "", sections=PLAIN, resumes=False) for name in names),
    ]
    on_two_ranks(folder, cases, site)
    return folder


def exported(folder):
    return load_file(folder / "runs/tiny/model/model.safetensors")


def stored(folder, part, step=STEPS):
    checkpoint = Checkpoint.at(folder / f"runs/tiny/checkpoints/step-{step:08d}")
    return checkpoint.tensors(part)


def scores(folder):
    events = read_events(folder / "runs/tiny/events")
    return [event.metrics["loss"] for event in events if isinstance(event, Validated)]


def flat(tensors):
    """Return the tensors without their shapes, which DeepSpeed's flat shards have lost."""
    return {name: tensor.reshape(-1) for name, tensor in tensors.items()}


def equal(one, other):
    one, other = flat(one), flat(other)
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


@each
def test_resumed_run_ends_with_the_same_state_and_model(root, name):
    whole, resumed = root / name / "whole", root / name / "resumed"
    assert equal(exported(whole), exported(resumed))
    for part in ("model", "optimizer", "component-ema"):
        assert equal(stored(whole, part), stored(resumed, part)), part
    norms = [
        json.loads((folder / "runs/tiny/grad-norms.json").read_text())["norms"]
        for folder in (whole, resumed)
    ]
    assert norms[0] == norms[1]
    assert len(norms[0]) == STEPS


@each
def test_validating_with_averaged_weights_does_not_change_training(root, name):
    averaged, plain = root / name / "whole", root / f"plain-{name}" / "whole"
    for part in ("model", "optimizer"):
        assert equal(stored(averaged, part), stored(plain, part)), part


@each
def test_sharded_averages_match_those_of_complete_weights(root, name):
    expected, found = (flat(stored(root / of / "whole", "component-ema")) for of in ("ddp", name))
    assert expected.keys() == found.keys()
    for weight, tensor in expected.items():
        torch.testing.assert_close(found[weight], tensor, rtol=1e-3, atol=1e-5)


@each
def test_average_is_exported_instead_of_the_weights(root, name):
    average = flat(stored(root / name / "whole", "component-ema"))
    weights = flat(stored(root / name / "whole", "model"))
    model = flat(exported(root / name / "whole"))
    for weight, tensor in model.items():
        assert tensor.equal(average[f"{weight}/average"]), weight
        assert not tensor.equal(weights[weight]), weight


@each
def test_scores_are_those_of_the_average(root, name):
    found, expected, plain = (
        scores(root / case / "whole") for case in (name, "ddp", f"plain-{name}")
    )
    assert len(found) == STEPS // EVERY
    assert found == pytest.approx(expected, rel=1e-3)
    assert all(abs(one - other) > 0.02 for one, other in zip(found, plain, strict=True))


@each
def test_run_continues_from_a_checkpoint_of_another_strategy(root, name):
    """What DDP has saved, this strategy restores: at the end, the averages agree."""
    whole = flat(stored(root / "ddp" / "whole", "component-ema"))
    continued = flat(stored(root / name / "from_single", "component-ema"))
    for weight, tensor in whole.items():
        torch.testing.assert_close(continued[weight], tensor, rtol=1e-3, atol=1e-5)
    first = stored(root / "ddp" / "whole", "component-ema", MIDDLE)
    assert first.keys() == whole.keys()


@each
def test_no_rank_saves_another_ranks_state(root, name):
    """The slices of all ranks cover each tensor once."""
    folder = root / name / "whole/runs/tiny/checkpoints" / f"step-{STEPS:08d}"
    entries = [
        item
        for item in Checkpoint.at(folder).manifest.tensors
        if item.name.startswith("component-ema/")
    ]
    for item in entries:
        held = sum(int(torch.tensor(part.shape).prod()) for part in item.slices)
        assert held == int(torch.tensor(item.shape).prod()), item.name
    assert len({part.file for item in entries for part in item.slices}) == 2

"""Optimizers under every strategy, killed and resumed: of another package, and built-in ones."""

from __future__ import annotations

from functools import partial

import pytest
from safetensors.torch import load_file

from support import selected, strategies
from support.plugins import install_example
from support.strategies import MIDDLE, RECIPE, Case, on_two_ranks
from support.training import weights_digest
from support.whole_runs import KillsOnce
from support.whole_runs import run as train

NAMED = {"optim": "my_lion", "lr_scheduler_type": "trapezoid", "learning_rate": 1e-3}
each = selected.each("name", ("ddp", "fsdp", "zero2", "zero3"), few=("fsdp",))
BUILT_IN = {
    "ddp": ("adam", "sgd", "adafactor", "lamb", "lars", "lion", "muon", "schedule_free_adamw"),
    **dict.fromkeys(("fsdp", "zero2"), ("adam", "sgd", "lion", "schedule_free_adamw")),
    "zero3": ("adam", "sgd", "lion"),
}
"""What each strategy supports."""
SMOOTH = {"lr_scheduler_type": "constant_with_warmup", "learning_rate": 1e-3}
each_built_in = selected.each(
    "built_in",
    [f"{optim}-{strategy}" for strategy, optims in BUILT_IN.items() for optim in optims],
    few=("muon-ddp", "schedule_free_adamw-fsdp"),
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Install the package for this process and those that it starts."""
    site = str(install_example(tmp_path_factory.mktemp("example")))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        yield site


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("optimizers")


@pytest.fixture(scope="module")
def losses(request, installed, root):
    """Train on one rank, then on two with each strategy; return the losses by case and run."""
    sections = {"training": {**RECIPE, **NAMED}}
    names = sorted(selected.selected(request, "name"))
    cases = [Case(name, name, "single", sections=sections) for name in names]
    alone = strategies.train(root / "single", **sections)
    found = on_two_ranks(root, cases, installed)
    return {"single": {str(step): loss for step, loss in alone.items()}, **found}


@pytest.fixture(scope="module")
def trained(request, root):
    """Train with built-in optimizers, each on one rank and on two; return losses as `losses`."""
    names = sorted(selected.selected(request, "built_in"))
    alone, cases = {}, []
    for name in names:
        optim, _, strategy = name.rpartition("-")
        sections = {"training": {**RECIPE, **SMOOTH, "optim": optim}}
        if optim not in alone:
            found = strategies.train(root / f"single-{optim}", **sections)
            alone[optim] = {str(step): loss for step, loss in found.items()}
        cases.append(Case(name, strategy, f"single-{optim}", sections=sections))
    return alone, on_two_ranks(root, cases, "")


def rest(losses):
    return {step: loss for step, loss in losses.items() if int(step) > MIDDLE}


def exported(folder):
    return load_file(folder / "runs/tiny/model/model.safetensors")


@each
def test_optimizer_learns_as_on_one_rank(losses, name):
    # Sums in another order change the sign of a gradient near 0.
    assert losses[name]["whole"] == pytest.approx(losses["single"], rel=1e-2)


@each
def test_optimizer_resumes_with_the_same_weights(losses, root, name):
    assert losses[name]["resumed"] == rest(losses[name]["whole"])
    whole, resumed = (exported(root / name / run) for run in ("whole", "resumed"))
    assert all(whole[key].equal(resumed[key]) for key in whole)


@each
def test_optimizer_resumes_from_a_checkpoint_of_one_rank(losses, name):
    assert losses[name]["from_single"] == pytest.approx(rest(losses["single"]), rel=1e-2)


@each_built_in
def test_built_in_optimizer_learns_as_on_one_rank_and_resumes(trained, root, built_in):
    alone, found = trained
    single, losses = alone[built_in.rpartition("-")[0]], found[built_in]
    assert losses["whole"] == pytest.approx(single, rel=1e-4)
    assert losses["resumed"] == rest(losses["whole"])
    assert losses["from_single"] == pytest.approx(rest(single), rel=1e-4)
    whole, resumed = (exported(root / built_in / run) for run in ("whole", "resumed"))
    assert all(whole[key].equal(resumed[key]) for key in whole)


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        pytest.param("auto", 1, marks=pytest.mark.long),
        pytest.param("ddp", 2, marks=pytest.mark.long),
        ("fsdp", 2),
    ],
)
def test_killed_run_ends_with_the_same_weights(installed, tmp_path, data, strategy, ranks):
    def digest(run, *, killed):
        training = {**RECIPE, **NAMED, "micro_batch_size": 2, "save_steps": 4}
        sections = {"run": run, "training": training}
        kills = partial(KillsOnce, rank=-1) if killed else False
        return weights_digest(
            train(tmp_path, data, sections, killed=kills, ranks=ranks, strategy=strategy)
        )

    assert digest("killed", killed=True) == digest("whole", killed=False)

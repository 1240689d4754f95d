"""What a search finds at equal cost, and what the driver itself costs.

Run with `pytest -m bench tests/bench/test_tuning.py -s` on an idle machine. The searches run over
learning curves that the benchmark records first (`support/learning_curves.py`);
STEADYTRAIN_BENCH_CURVES is a folder that keeps them, and STEADYTRAIN_BENCH_SEEDS the number of
searches.
"""

from __future__ import annotations

import os
import statistics
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import optuna
import psutil
import pytest

from steadytrain.components.shared.config import load
from steadytrain.components.tune.driver import drive
from steadytrain.components.tune.log import MemoryLog
from steadytrain.components.tune.optuna_storage import sampled
from steadytrain.components.tune.rungs import Rungs
from steadytrain.components.tune.space import varies
from steadytrain.components.tune.study import Study

from support.learning_curves import loss, recorded, settings_of
from support.synthetic_trials import SPACE, Quiet, SyntheticTrials, World

pytestmark = pytest.mark.bench
SEEDS = int(os.environ.get("STEADYTRAIN_BENCH_SEEDS", "10"))
TRIALS = 27
"""Full trials whose steps each search may spend. All batches have as many tokens."""


def study_settings(seed, *overrides):
    plain = settings_of()
    budget = {"trials": 1000, "steps": TRIALS * plain.training.max_steps}
    return settings_of(("tune.seed", seed), ("tune.budget", budget), *overrides)


def world_of(curves):
    return World(objective=partial(loss, curves))


def searched(config, curves):
    """Search with our driver; return (steps spent, loss) of each validation in their order."""
    log = MemoryLog()
    drive(Study(config, log), SyntheticTrials(world_of(curves)), Quiet(), lambda: None)
    found, before, reached = [], 0, {}
    for record in log.records:
        if record["kind"] == "reported":
            start = reached.get(record["number"], 0)
            for step, metrics in record["validations"]:
                found.append((before + step - start, metrics["loss"]))
            reached[record["number"]] = record["step"]
            before += record["step"] - start
    return found


def searched_by_optuna(config, curves):
    """Do the same with Optuna's own loop and HyperbandPruner, which ends trials for good."""
    cuts, space, found, spent = Rungs.of(config).cuts, config.tune.space, [], 0
    study = optuna.create_study(
        sampler=optuna.samplers.TPESampler(seed=config.tune.seed, multivariate=True),
        pruner=optuna.pruners.HyperbandPruner(cuts[0], cuts[-1], config.tune.reduction_factor),
    )
    trials = SyntheticTrials(world_of(curves))
    plain = Study(config, MemoryLog())
    while spent < config.tune.budget.steps:
        trial, params, before = study.ask(), {}, 0
        for field in space:
            if varies(space, field, params):
                params[field] = sampled(trial, field, space[field])
        for cut in cuts:
            trials.train(trial.number, plain.trial_config(params), cut)
            state = trials.state(trial.number)
            new = [item for item in state.validations if item.step > before]
            for item in new:
                found.append((spent + item.step - before, item.metrics["loss"]))
                trial.report(item.metrics["loss"], item.step)
            spent, before = spent + cut - before, cut
            if cut < cuts[-1] and trial.should_prune():
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                break
        else:
            study.tell(trial, new[-1].metrics["loss"])
    return [(steps, loss) for steps, loss in found if steps <= config.tune.budget.steps]


def falling(found):
    """Return the best loss so far after each validation, with the steps spent."""
    best, line = float("inf"), []
    for steps, score in sorted(found):
        best = min(best, score)
        line.append((steps, best))
    return line


def area(line):
    """Return the mean of the best loss so far over the steps."""
    width = line[-1][0] - line[0][0]
    return sum((b[0] - a[0]) * a[1] for a, b in pairwise(line)) / width


ARMS = {
    "random search": (searched, ("tune.sampler=random", "tune.pruner=none")),
    "Optuna's HyperbandPruner": (searched_by_optuna, ()),
    "TPE and Hyperband, the default": (searched, ()),
    "TPE and ASHA": (searched, ("tune.pruner=asha",)),
}


@pytest.mark.timeout(0)
def test_quality_at_equal_tokens(tmp_path):
    folder = Path(os.environ.get("STEADYTRAIN_BENCH_CURVES", tmp_path))
    curves = recorded(folder, parallel=os.cpu_count() or 1)
    lines = {
        name: [falling(search(study_settings(seed, *overrides), curves)) for seed in range(SEEDS)]
        for name, (search, overrides) in ARMS.items()
    }
    targets = [line[-1][1] for line in lines["random search"]]
    print(f"\n{SEEDS} seeds, the tokens of {TRIALS} full trials each: median (quartiles)")
    shares = {}
    for name, found in lines.items():
        shares[name] = [reached(line, target) for line, target in zip(found, targets, strict=True)]
        print(f"  {name}: best {spread([line[-1][1] for line in found])}")
        print(f"    area under the curve {spread([area(line) for line in found])}")
        print(f"    share of the tokens for random search's best {spread(shares[name])}")
    assert statistics.median(shares["TPE and Hyperband, the default"]) <= 0.35


def reached(line, target):
    """Return the share of the budget after which a search is as good as a target."""
    most = TRIALS * settings_of().training.max_steps
    return next((steps / most for steps, best in line if best <= target), float("inf"))


def spread(values):
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


@pytest.mark.timeout(0)
@pytest.mark.parametrize(("sampler", "count"), [("random", 10_000), ("tpe", 1000)])
def test_driver_over_many_simulated_trials(sampler, count):
    """Memory grows only by the history, and a suggestion takes about as long as at first."""
    config = load(
        "causal-lm",
        [
            ("tune.space", SPACE),
            ("tune.budget.trials", count),
            ("tune.sampler", sampler),
            "training.max_steps=270",
            "training.eval_steps=30",
        ],
    )
    study, times, sizes = Study(config, Forgetful()), [], []

    class Measured(Quiet):
        def started(self, study, trial):
            times.append(time.process_time())
            sizes.append(psutil.Process().memory_info().rss)

    drive(study, Light(World()), Measured(), lambda: None, poll_seconds=0)
    tenth = len(times) // 10
    first = (times[tenth] - times[0]) / tenth
    last = (times[-1] - times[-tenth]) / tenth
    print(
        f"\n{sampler}, {count:,} trials: {1e3 * first:.1f} ms of CPU a decision at first, "
        f"{1e3 * last:.1f} ms at last; resident memory {sizes[tenth] / 1e6:.0f} MB after a tenth, "
        f"{sizes[-1] / 1e6:.0f} MB at the end"
    )
    assert sizes[-1] - sizes[tenth] < 10_000 * count


class Light(SyntheticTrials):
    """Trials that leave nothing behind, as real ones leave nothing in the driver's memory."""

    def discard(self, number):
        super().discard(number)
        for left in (self.world.configs, self.world.curves, self.world.trained):
            left.pop(number, None)


class Forgetful(MemoryLog):
    """A log whose records are elsewhere, as those of a file are."""

    def append(self, *records):
        pass

"""What a search finds at equal cost, and what the driver itself costs.

Run with `pytest -m bench tests/bench/test_tuning.py -s` on an idle machine. STEADYTRAIN_BENCH_SEEDS
and STEADYTRAIN_BENCH_TRIALS shorten the first one.
"""

from __future__ import annotations

import os
import statistics
import time
from itertools import pairwise

import optuna
import psutil
import pytest

from steadytrain.components.shared.config import load
from steadytrain.components.tune.driver import drive
from steadytrain.components.tune.log import MemoryLog
from steadytrain.components.tune.mirror import sampled
from steadytrain.components.tune.rungs import Rungs
from steadytrain.components.tune.space import varies
from steadytrain.components.tune.study import Study
from steadytrain.components.tune.trials.local import local_trials

from support import trials as support
from support.synthetic_trials import SPACE, Quiet, SyntheticTrials, World

pytestmark = pytest.mark.bench
SEEDS = int(os.environ.get("STEADYTRAIN_BENCH_SEEDS", "10"))
TRIALS = int(os.environ.get("STEADYTRAIN_BENCH_TRIALS", "27"))
"""Full trials whose steps each search may spend."""


def settings_of(seed, *overrides):
    """The preset, whose model has 0.17 million parameters: each batch has the same tokens."""
    most = TRIALS * load("tune-causal-lm").training.max_steps
    return load(
        "tune-causal-lm",
        [
            ("tune.seed", seed),
            ("tune.budget", {"trials": 1000, "steps": most}),
            "compute.device=cpu",
            "compute.threads_per_rank=1",
            *overrides,
        ],
    )


def searched(config, folder):
    """Search with our driver; return (steps spent, loss) of each validation in their order."""
    log, trials = MemoryLog(), local_trials(folder)
    try:
        drive(Study(config, log), trials, Quiet(), lambda: None)
    finally:
        trials.close()
    found, before, reached = [], 0, {}
    for record in log.records:
        if record["kind"] == "reported":
            start = reached.get(record["number"], 0)
            for step, metrics in record["validations"]:
                found.append((before + step - start, metrics["loss"]))
            reached[record["number"]] = record["step"]
            before += record["step"] - start
    return found


def searched_by_optuna(config, folder):
    """Do the same with Optuna's own loop and HyperbandPruner, which ends trials for good."""
    cuts, space, found, spent = Rungs.of(config).cuts, config.tune.space, [], 0
    study = optuna.create_study(
        sampler=optuna.samplers.TPESampler(seed=config.tune.seed, multivariate=True, group=True),
        pruner=optuna.pruners.HyperbandPruner(cuts[0], cuts[-1], config.tune.reduction_factor),
    )
    trials = local_trials(folder)
    trials.attach()
    plain = Study(config, MemoryLog())
    try:
        while spent < config.tune.budget.steps:
            trial, params, before = study.ask(), {}, 0
            for field in space:
                if varies(space, field, params):
                    params[field] = sampled(trial, field, space[field])
            for cut in cuts:
                trials.train(trial.number, plain.trial_config(params), cut)
                state = support.ended(trials, trial.number)
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
            trials.discard(trial.number)
    finally:
        trials.close()
    return [(steps, loss) for steps, loss in found if steps <= config.tune.budget.steps]


def falling(found):
    """Return the best loss so far after each validation, with the steps spent."""
    best, line = float("inf"), []
    for steps, loss in sorted(found):
        best = min(best, loss)
        line.append((steps, best))
    return line


def area(line):
    """Return the mean of the best loss so far over the steps."""
    width = line[-1][0] - line[0][0]
    return sum((b[0] - a[0]) * a[1] for a, b in pairwise(line)) / width


@pytest.mark.timeout(0)
def test_quality_at_equal_tokens(tmp_path):
    arms = {
        "random search": (searched, ("tune.sampler=random", "tune.pruner=none")),
        "Optuna's HyperbandPruner": (searched_by_optuna, ()),
        "TPE and Hyperband": (searched, ()),
    }
    best, mean, needed = {}, {}, []
    for seed in range(SEEDS):
        lines = {}
        for index, (name, (search, overrides)) in enumerate(arms.items()):
            config = settings_of(seed, *overrides)
            lines[name] = falling(search(config, tmp_path / f"{seed}-{index}"))
            best.setdefault(name, []).append(lines[name][-1][1])
            mean.setdefault(name, []).append(area(lines[name]))
            shown = f"best {best[name][-1]:.4f}, area {mean[name][-1]:.4f}"
            print(f"\nseed {seed}, {name}: {shown}", flush=True)
        target, most = lines["random search"][-1][1], config.tune.budget.steps
        reached = [steps for steps, loss in lines["TPE and Hyperband"] if loss <= target]
        needed.append(reached[0] / most if reached else float("inf"))
        print(f"seed {seed}: {needed[-1]:.2f} of the tokens for the best of random search")
    print(f"\nmedians over {SEEDS} seeds, {TRIALS} full trials' tokens each:")
    for name in arms:
        loss, under = statistics.median(best[name]), statistics.median(mean[name])
        print(f"  {name}: best {loss:.4f}, area {under:.4f}")
    print(f"  share of the tokens for the best of random search: {statistics.median(needed):.2f}")
    assert statistics.median(best["TPE and Hyperband"]) <= statistics.median(best["random search"])


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

    def append(self, record):
        pass

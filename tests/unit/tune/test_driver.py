"""A driver that dies at any moment and starts again decides what an undisturbed one decides."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steadytrain.components.shared.config import load
from steadytrain.components.shared.errors import BadInput, RunBusy, Stopped, StorageError
from steadytrain.components.tune.driver import TooManyFailed, drive, driving
from steadytrain.components.tune.log import MemoryLog
from steadytrain.components.tune.results import best, front
from steadytrain.components.tune.study import Study
from steadytrain.components.tune.trials.base import TrialState, Validation

from support.promotions import check_promotions
from support.synthetic_trials import SPACE, Quiet, SyntheticTrials, World


class Killed(BaseException):
    """The driver is gone."""


class MortalLog(MemoryLog):
    """A log whose records outlive the driver.

    lives: appends until the driver dies.
    late: whether it dies right before the next append instead of right after the last one.
    """

    def __init__(self, records, lives, *, late):
        super().__init__(records)
        self.lives, self.late = lives, late

    def append(self, *records):
        for record in records:
            if self.lives == 0:
                raise Killed
            super().append(record)
            self.lives -= 1
            if self.lives == 0 and not self.late:
                raise Killed


def settings_of(*overrides, trials=14, pruner="asha", sampler="tpe"):
    return load(
        "causal-lm",
        [
            ("tune.space", SPACE),
            ("training.max_steps", 270),
            ("training.eval_steps", 10),
            ("tune.budget.trials", trials),
            ("tune.pruner", pruner),
            ("tune.sampler", sampler),
            *overrides,
        ],
    )


def driven(config, log, world, **options):
    study = Study(config, log)
    trials = SyntheticTrials(world, **options)
    try:
        drive(study, trials, Quiet(), lambda: None, poll_seconds=0)
    finally:
        assert trials.closed
    return study


@pytest.mark.parametrize("sampler", ["tpe", "gp", "qmc", "cmaes"])
@pytest.mark.parametrize(("late", "orphans_live"), [(False, False), (True, True)])
def test_driver_killed_after_every_record_leaves_the_history_of_an_undisturbed_one(
    sampler, late, orphans_live
):
    config = settings_of(sampler=sampler)
    undisturbed, world = MemoryLog(), World()
    driven(config, undisturbed, world)
    log, other = MortalLog([], 1, late=late), World()
    deaths = 0
    while True:
        try:
            driven(config, log, other, orphans_live=orphans_live)
            break
        except Killed:
            deaths += 1
            log = MortalLog(log.records, 1, late=late)
    assert deaths >= len(undisturbed.records) - 1
    assert log.records == undisturbed.records
    assert other.trained == world.trained


def test_trial_killed_after_its_last_step_starts_again_and_finishes():
    undisturbed, log = MemoryLog(), MemoryLog()
    driven(settings_of(trials=2, pruner="none"), undisturbed, World())
    study = driven(settings_of(trials=2, pruner="none"), log, World(killed_at_end={0, 1}))
    assert [trial.status for trial in study.history.trials] == ["finished"] * 2
    assert log.records == undisturbed.records


@pytest.mark.slow
def test_log_that_lost_its_last_records_leads_to_the_same_history():
    config = settings_of()
    undisturbed, world = MemoryLog(), World()
    driven(config, undisturbed, world)
    for lost in range(1, len(undisturbed.records)):
        other = World()
        cut = MemoryLog()
        driven(config, cut, other)
        # What the records said has happened; only the records are gone.
        other.discarded.clear()
        log = MemoryLog(cut.records[:-lost])
        driven(config, log, other)
        assert timeless(log.records) == timeless(undisturbed.records)
        assert other.trained == world.trained


def timeless(records):
    """Return records without the seconds until each rung, which only the lost records had."""
    return [{**record, "seconds": 0} for record in records]


@pytest.mark.parametrize("pruner", ["none", "median", "asha", "hyperband"])
def test_larger_budget_continues_a_study(pruner):
    log, world = MemoryLog(), World()
    driven(settings_of(trials=6, pruner=pruner), log, world)
    study = driven(settings_of(trials=20, pruner=pruner), log, world)
    assert len(study.history.trials) == 20
    assert all(len(set(steps)) == len(steps) for steps in world.trained.values())


def test_other_settings_are_another_study():
    log = MemoryLog()
    driven(settings_of(trials=2), log, World())
    with pytest.raises(BadInput, match=r"other settings: training\.learning_rate \S+ -> 0\.001\n"):
        Study(settings_of("training.learning_rate=1e-3", "output=elsewhere", trials=2), log)
    with pytest.raises(BadInput, match=r"other settings: tune\.seed \d+ -> 1\n") as refused:
        Study(settings_of("tune.seed=1", trials=3), log)
    assert "another name" in refused.value.remedy
    log.records[0] = {**log.records[0], "config": "{"}
    with pytest.raises(BadInput, match="other settings: they are of another version"):
        Study(settings_of("tune.seed=1", trials=2), log)


def test_search_finds_a_good_trial_with_a_part_of_the_steps():
    study = driven(settings_of(trials=60, pruner="asha"), MemoryLog(), World())
    finished = [trial for trial in study.history.trials if trial.status == "finished"]
    assert min(study.history.values(trial)[0] for trial in finished) < 2.1
    assert study.steps < 60 * 270 * 0.5


def test_sampler_compares_trials_at_the_highest_rung_that_enough_have_reached():
    world = World()
    study = driven(settings_of(trials=40), MemoryLog(), world)
    rung, told = study._suggester._rung, study._suggester._study.study.trials
    assert study.rungs.cuts[0] < rung
    compared = {trial.number: trial.value for trial in told if trial.state.name == "COMPLETE"}
    assert len(compared) > len(study.tune.space)
    assert compared == {n: world.objective(world.configs[n], rung) for n in compared}
    reached = {trial.number for trial in study.history.trials if trial.reached >= rung}
    assert compared.keys() == reached


def test_failed_trial_reaches_the_sampler_with_its_class_and_the_study_continues():
    study = driven(settings_of(), MemoryLog(), World(failing={1: "oom", 4: "crash"}))
    failed = {t.number: t.failure for t in study.history.trials if t.status == "failed"}
    assert failed == {1: "oom", 4: "crash"}
    told = study._suggester._study.study.trials
    assert [told[n].state.name for n in (1, 4)] == ["FAIL", "FAIL"]
    assert told[1].user_attrs == {"failure": "oom"}


def test_too_many_failed_trials_stop_the_study_and_name_the_last():
    world = World(failing=dict.fromkeys(range(14), "oom"))
    with pytest.raises(TooManyFailed, match=r"3 of 3 trials failed.*trial 2: broken"):
        driven(settings_of(), MemoryLog(), world)
    assert sum(map(len, world.trained.values())) < 10


@pytest.mark.parametrize("parallel", [1, 3])
def test_study_whose_storage_fails_stops_and_continues_as_if_it_never_had(parallel):
    config = settings_of(f"tune.budget.parallel={parallel}")
    undisturbed = driven(config, MemoryLog(), World())
    log, world = MemoryLog(), World(failing={4: "storage"})
    with pytest.raises(StorageError, match="trial 4 failed: broken") as stopped:
        driven(config, log, world)
    assert "the trial and the study continue" in stopped.value.remedy
    assert not any(record["kind"] == "failed" for record in log.records)
    world.failing.clear()
    study = driven(config, log, world)
    assert study.history.failed == 0
    assert all(len(set(steps)) == len(steps) for steps in world.trained.values())
    if parallel == 1:
        assert study.history.trials == undisturbed.history.trials


@pytest.mark.parametrize("pruner", ["none", "asha"])
def test_trial_above_the_latency_limit_ends_at_its_first_rung_and_is_never_the_best(pruner):
    def latency(config):
        return 30.0 if config.training.learning_rate < 5e-3 else 5.0

    config = settings_of("tune.constraints.latency_ms=20", pruner=pruner)
    log, world = MemoryLog(), World(latency=latency)
    study = driven(config, log, world)
    slow, fast = (
        [t for t in study.history.trials if (latency(world.configs[t.number]) > 20) == above]
        for above in (True, False)
    )
    assert slow
    assert all(t.status == "discarded" for t in slow)
    assert {t.reached for t in slow} == {study.rungs.cuts[0]}
    assert {t.number for t in slow} <= world.discarded
    assert best(study) in fast
    told = study._suggester._study.study.trials
    assert {t.number for t in told if t.constraints["latency_ms"] > 0} == {t.number for t in slow}
    assert Study(config, log).history.trials == study.history.trials


def test_impossible_combinations_fail_as_bad_input():
    space = {
        "training.bf16": {"choices": [False, True]},
        "training.fp16": {"choices": [False, True]},
    }
    config = settings_of(("tune.space", space), "tune.max_failed_share=1.0", sampler="grid")
    study = driven(config, MemoryLog(), World(objective=lambda config, step: 1.0 / step))
    assert [trial.status == "failed" for trial in study.history.trials].count(True) == 1
    (failed,) = [trial for trial in study.history.trials if trial.status == "failed"]
    assert failed.failure == "bad_input"
    assert "training.fp16" in failed.error


def test_grid_ends_when_every_combination_was_tried():
    space = {
        "training.lr_scheduler_type": {"choices": ["linear", "constant"]},
        "training.warmup_steps": {
            "low": 0,
            "high": 20,
            "step": 10,
            "when": {"training.lr_scheduler_type": "linear"},
        },
    }
    config = settings_of(("tune.space", space), sampler="grid", pruner="none")
    study = driven(config, MemoryLog(), World(objective=lambda config, step: 1.0))
    assert [dict(trial.params) for trial in study.history.trials] == [
        *(
            {"training.lr_scheduler_type": "linear", "training.warmup_steps": value}
            for value in (0.0, 10.0, 20.0)
        ),
        {"training.lr_scheduler_type": "constant"},
    ]


def test_stop_request_ends_the_trials_and_the_study_can_be_continued():
    config, log, world = settings_of("tune.budget.parallel=3"), MemoryLog(), World(pace=3)
    looks = iter(range(20))

    def check():
        if next(looks, None) is None:
            raise Stopped

    trials = SyntheticTrials(world)
    with pytest.raises(Stopped):
        drive(Study(config, log), trials, Quiet(), check, poll_seconds=0)
    assert trials.closed
    study = driven(config, log, world)
    assert len(study.history.trials) == 14
    assert not study.running


def test_objective_that_no_validation_has_is_an_error_that_lists_the_metrics():
    with pytest.raises(BadInput, match=r"(?s)'accuracy'.*one of loss"):
        driven(settings_of("tune.objective.metric=accuracy"), MemoryLog(), World())


def test_hours_and_usd_end_a_study_and_running_trials_stop():
    config = settings_of("tune.budget.hours=0.01", pruner="none")  # 36 s; a trial takes 27 s
    study = driven(config, MemoryLog(), World())
    assert len(study.history.trials) == 2
    config = settings_of("tune.budget.usd=1", "compute.price_per_hour=100", pruner="none")
    study = driven(config, MemoryLog(), World())
    assert len(study.history.trials) == 2


def test_two_drivers_never_work_on_one_study(tmp_path):
    config = settings_of(("output", str(tmp_path)))
    with driving(config), pytest.raises(RunBusy, match=r"^study .* driven by"), driving(config):
        pass
    with driving(config):
        pass


def test_several_objectives_give_a_pareto_front():
    config = settings_of(
        "tune.more_objectives=[{metric: speed, direction: maximize}]", pruner="none", trials=5
    )
    study = Study(config, MemoryLog())
    values = {0: (1.0, 1.0), 1: (2.0, 2.0), 2: (3.0, 1.5), 3: (1.5, 0.5), 4: (0.5, 0.1)}
    for loss, speed in values.values():
        found = study.next()
        state = TrialState("finished", 270, (Validation(270, {"loss": loss, "speed": speed}),))
        study.report(found.number, state)
    assert [trial.number for trial in front(study)] == [0, 1, 4]


@pytest.mark.slow
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    pruner=st.sampled_from(["none", "median", "asha", "hyperband"]),
    factor=st.integers(2, 4),
    trials=st.integers(1, 40),
    steps=st.none() | st.integers(270, 4000),
    parallel=st.integers(1, 5),
    failing=st.sets(st.integers(0, 40), max_size=5),
    pace=st.integers(1, 4),
    deaths=st.lists(st.tuples(st.integers(1, 30), st.booleans()), max_size=4),
    orphans_live=st.booleans(),
    seed=st.integers(0, 9),
)
def test_every_trial_counts_once_every_promotion_is_legal_and_the_budget_is_kept(
    pruner, factor, trials, steps, parallel, failing, pace, deaths, orphans_live, seed
):
    config = settings_of(
        ("tune.reduction_factor", factor),
        ("tune.budget.steps", steps),
        ("tune.budget.parallel", parallel),
        ("tune.seed", seed),
        "tune.max_failed_share=1.0",
        pruner=pruner,
        trials=trials,
        sampler="random",
    )
    world, log = World(pace=pace, failing=dict.fromkeys(failing, "crash")), MemoryLog()
    for lives, late in deaths:
        mortal = MortalLog(log.records, lives, late=late)
        with contextlib.suppress(Killed):
            driven(config, mortal, world, orphans_live=orphans_live, seed=seed)
        log = MemoryLog(mortal.records)
    study = driven(config, log, world, orphans_live=orphans_live, seed=seed)
    history = study.history
    assert not history.running
    assert world.most_running <= parallel
    assert len(history.trials) <= trials
    assert steps is not None or len(history.trials) == trials
    done = sum(10 * len(each) for each in world.trained.values())
    assert done <= study.steps <= (steps or done + 270 * len(failing))
    assert all(each == sorted(set(each)) for each in world.trained.values())
    if steps is None and not failing:
        ended = ("finished", "discarded")
        assert all(trial.status in ended for trial in history.trials)
    if not failing:
        assert best(study) is not None
    check_promotions(log.records, study, parallel)

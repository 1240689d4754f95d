"""Which units of a search begin when its wall time is limited, driven with a clock of our own."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from steadytrain.components.automl import step, time_limit
from steadytrain.components.automl.design import SearchDesign, as_automl
from steadytrain.components.automl.portfolio import Configuration, families, portfolio
from steadytrain.components.automl.step import named, of_search, won
from steadytrain.components.shared.config import load
from steadytrain.components.shared.errors import BadInput, SteadytrainError
from steadytrain.components.shared.processes import host_memory
from steadytrain.components.tune import search
from steadytrain.components.tune import study as studies
from steadytrain.components.tune.driver import TooManyFailed, drive
from steadytrain.components.tune.log import MemoryLog
from steadytrain.components.tune.study import Study
from steadytrain.components.tune.trials.base import TrialState, Validation

from support.synthetic_trials import Quiet, SyntheticTrials, World

FOLDS, SLOW = 4, "extra trees, larger leaves"
BESIDE = 2.0


class Machine:
    """Units that take as long as `seconds` says, on a clock that only they move."""

    poll = 0.1

    def __init__(self, monkeypatch, seconds, parallel=1, preparing=0.0):
        self.now, self.parallel, self.seconds = 1000.0, parallel, seconds
        # How long the data of the first unit take.
        self.preparing = preparing
        self.began, self.stopped, self.memories = {}, [], {}
        monkeypatch.setattr(studies.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(studies.time, "time", lambda: 0.0)

    def train(self, number, config, until):
        self.began.setdefault(number, self.now)

    def state(self, number):
        if number not in self.began:
            return TrialState("new")
        self.now += self.poll
        taken = self.now - self.began[number] - (self.preparing if number == 0 else 0.0)
        if taken < self.seconds(number // FOLDS):
            return TrialState("running", 1, since_prepared=taken if taken >= 0 else None)
        curve = (Validation(1, {"loss": 1.0}),)
        return TrialState("finished", 1, curve, self.now - self.began[number])

    def memory(self, number, most):
        return self.memories.get(number, 0)

    def stop(self, number, **_):
        self.stopped.append(number)

    def discard(self, number): ...

    def attach(self):
        return frozenset()

    def close(self, **_): ...


LIMITS = ["automl.quality=fast", "data.source=[none.csv]", "data.target=y"]


def search_with(*settings):
    return as_automl(load("tabular", [*LIMITS, *settings]))


def names_of(config):
    return [item.name for item in portfolio(config)[0][:8]]


def driven(config, log, machine, members=(1,), starting=0.0):
    def design(known, history):
        return SearchDesign(known, history, lambda _: None, lambda: members)

    first = [item.as_plain() for item in portfolio(config)[0][:8]]
    study = Study(config, log, first=lambda: first, design=design)
    machine.now += starting
    drive(study, machine, Quiet(), lambda: None, poll_seconds=0)
    return study


def whole(study):
    """Return the configurations that all folds were trained of, by name."""
    names, trials = names_of(study.config), study.history.trials
    return [
        name
        for place, name in enumerate(names)
        if [it.status for it in trials[place * FOLDS :][:FOLDS]] == ["finished"] * FOLDS
    ]


def predictable(config):
    """Return what a unit of each configuration takes, as its family's costs predict."""
    known = [item.family for item in portfolio(config)[0]]
    return lambda place: BESIDE + 0.1 * families()[known[place]].seconds


@pytest.mark.parametrize(
    ("given", "repeats"),
    [
        ([], 3),
        (["automl.budget.hours=0.25"], 3),
        (["automl.budget.hours=0.2"], 1),
        (["automl.budget.hours=0.2", "automl.repeats=2"], 2),
    ],
)
def test_small_table_is_divided_once_if_there_is_little_time(tmp_path, given, repeats):
    (tmp_path / "t.csv").write_text("x,y\n1,a\n2,b\n")
    best = ["automl.quality=best", f"data.source=[{tmp_path / 't.csv'}]", "data.target=y"]
    found = as_automl(load("tabular", [*best, *given]))
    assert found.cross_validation.repeats == repeats


def test_search_without_a_limit_starts_everything(monkeypatch):
    config = search_with("automl.budget.parallel=1")
    study = driven(config, MemoryLog(), Machine(monkeypatch, predictable(config)))
    assert whole(study) == names_of(config)


@pytest.mark.parametrize("parallel", [1, 3])
@pytest.mark.parametrize("seconds", [80, 120, 200])
def test_no_unit_begins_that_does_not_end_and_the_winner_has_its_time(
    monkeypatch, parallel, seconds
):
    config = search_with(
        f"automl.budget.hours={seconds / 3600}", f"automl.budget.parallel={parallel}"
    )
    machine, log = Machine(monkeypatch, predictable(config), parallel), MemoryLog()
    study = driven(config, log, machine)
    trials = study.history.trials
    assert not study.running
    # Written together, but all.
    assert sum(it["kind"] == "skipped" for it in log.records) == study.history.not_started
    assert {trial.status for trial in trials} <= {"finished", "skipped"}
    assert any(trial.status == "skipped" for trial in trials) == (len(whole(study)) < 8)
    winner = 0.1 * families()["linear"].seconds * FOLDS / (FOLDS - 1) + 13 * BESIDE
    assert study.elapsed + winner < seconds * 1.02
    for trial in trials:
        if trial.status == "skipped":
            assert trial.reason.startswith("not started: time (its folds take about")


def test_expensive_configuration_is_left_out_and_cheaper_ones_after_it_are_trained(monkeypatch):
    config = search_with("automl.budget.hours=0.055", "automl.budget.parallel=1")
    usual = predictable(config)
    slow = names_of(config).index(SLOW)
    machine = Machine(monkeypatch, lambda place: 40.0 if place == slow else usual(place))
    study = driven(config, MemoryLog(), machine)
    found = study.history.trials[slow * FOLDS :][:FOLDS]
    assert [trial.status for trial in found] == ["finished", *["skipped"] * 3]
    assert whole(study)[-1] in names_of(config)[slow + 1 :]


def test_larger_limit_continues_with_what_was_left_out(monkeypatch):
    small = search_with("automl.budget.hours=0.025", "automl.budget.parallel=1")
    large = search_with("automl.budget.hours=1", "automl.budget.parallel=1")
    log = MemoryLog()
    first = driven(small, log, Machine(monkeypatch, predictable(small)))
    assert whole(first) != names_of(small)
    before = len(log.records)
    again = driven(small, log, Machine(monkeypatch, predictable(small)))
    assert len(log.records) == before
    assert whole(again) == whole(first)
    machine = Machine(monkeypatch, predictable(large))
    study = driven(large, log, machine)
    assert whole(study) == names_of(large)
    known = {trial.number for trial in first.history.trials if trial.status == "finished"}
    assert not known & machine.began.keys()


def test_unit_that_takes_far_longer_than_predicted_is_killed_and_its_other_folds_do_not_begin(
    monkeypatch,
):
    config = search_with("automl.budget.parallel=1")
    usual, slow = predictable(config), names_of(config).index(SLOW)
    machine = Machine(monkeypatch, lambda place: 1e9 if place == slow else usual(place))
    study = driven(config, MemoryLog(), machine)
    first, *others = study.history.trials[slow * FOLDS :][:FOLDS]
    assert (first.status, first.failure) == ("failed", "hang")
    assert first.error.startswith("killed after 10 min")
    assert machine.stopped == [first.number]
    assert [(trial.status, trial.reason) for trial in others] == [("skipped", "fold 0 failed")] * 3
    assert whole(study) == [name for name in names_of(config) if name != SLOW]


def test_unit_that_takes_too_much_memory_is_killed_and_its_other_folds_do_not_begin(monkeypatch):
    config = search_with("automl.budget.parallel=1", "automl.constraints.memory_gb=2")
    hungry = names_of(config).index(SLOW)
    machine = Machine(monkeypatch, predictable(config))
    machine.memories = {hungry * FOLDS: 2_100_000_000, 0: 1_900_000_000}
    study = driven(config, MemoryLog(), machine)
    first, *others = study.history.trials[hungry * FOLDS :][:FOLDS]
    assert (first.status, first.failure) == ("failed", "host_oom")
    assert first.error == "killed with 2.1 GB of memory: it may take 2 GB"
    assert machine.stopped == [first.number]
    assert [(trial.status, trial.reason) for trial in others] == [("skipped", "fold 0 failed")] * 3
    assert whole(study) == [name for name in names_of(config) if name != SLOW]


def failing(machine, places):
    """Let all units of some configurations fail."""
    usual = machine.state

    def state(number):
        failed = number // FOLDS in places and number in machine.began
        return (
            TrialState("failed", failure="bad_input", error="it has no")
            if failed
            else usual(number)
        )

    machine.state = state
    return machine


@pytest.mark.parametrize("parallel", [1, 3])
def test_configurations_that_fail_cost_no_other(monkeypatch, parallel):
    config = search_with(f"automl.budget.parallel={parallel}")
    # Half of all, more than tune.max_failed_share.
    machine = failing(Machine(monkeypatch, predictable(config), parallel), {1, 2, 4, 7})
    study = driven(config, MemoryLog(), machine)
    assert whole(study) == [names_of(config)[place] for place in (0, 3, 5, 6)]


def test_few_units_do_not_end_with_the_first_that_fails(monkeypatch):
    config = search_with("automl.budget.parallel=1", "automl.budget.units=8")
    study = driven(config, MemoryLog(), failing(Machine(monkeypatch, predictable(config)), {0}))
    assert whole(study) == names_of(config)[1:2]


def test_units_that_are_too_few_for_one_more_configuration_do_not_begin(monkeypatch):
    config = search_with("automl.budget.parallel=3", "automl.budget.units=11")
    study = driven(config, MemoryLog(), Machine(monkeypatch, predictable(config), 3))
    assert whole(study) == names_of(config)[:2]
    assert len(study.history.trials) == 2 * FOLDS
    more = search_with("automl.budget.parallel=3", "automl.budget.units=12")
    log = MemoryLog()
    driven(config, log, Machine(monkeypatch, predictable(config), 3))
    assert (
        whole(driven(more, log, Machine(monkeypatch, predictable(more), 3))) == names_of(more)[:3]
    )


@pytest.mark.parametrize(("share", "first"), [(0.2, 2), (0.5, 5), (0.0, 2)])
def test_search_ends_if_none_of_its_first_configurations_can_be_trained(monkeypatch, share, first):
    config = search_with("automl.budget.parallel=1", f"tune.max_failed_share={share}")
    machine = failing(Machine(monkeypatch, predictable(config)), set(range(8)))
    log = MemoryLog()
    with pytest.raises(TooManyFailed, match=f"the first {first} configurations failed.*it has no"):
        driven(config, log, machine)
    assert {number // FOLDS for number in machine.began} == set(range(first))


def test_units_share_the_machine_or_have_the_memory_of_their_pods(monkeypatch):
    for parallel in (1, 3):
        config = search_with(f"automl.budget.parallel={parallel}")
        history = SimpleNamespace(queued=[], trials=[], running={})
        design = SearchDesign(config, history, lambda _: None)
        assert design.most_memory == pytest.approx(0.9 * host_memory() / parallel)
    with pytest.raises(BadInput, match=r"automl\.constraints\.memory_gb = 3"):
        as_automl(load("tabular", [*LIMITS, "automl.constraints.memory_gb=3"]), in_pods=True)


def test_framework_that_no_family_has_is_refused():
    with pytest.raises(BadInput, match="has 'lightgmb'") as caught:
        search_with("automl.constraints.frameworks=[sklearn, lightgmb]")
    assert "lightgbm" in caught.value.remedy


def test_unit_may_take_what_the_configuration_allows(monkeypatch):
    config = search_with("automl.budget.parallel=1", "automl.budget.unit_minutes=0.1")
    machine = Machine(monkeypatch, lambda place: 7.0 if place == 2 else 5.0)
    study = driven(config, MemoryLog(), machine)
    assert [it.number for it in study.history.trials if it.status == "failed"] == [2 * FOLDS]
    assert "it may take 6 s (automl.budget.unit_minutes)" in study.history.trials[8].error


@pytest.mark.slow
def test_minutes_of_a_unit_count_from_when_its_data_are_prepared(monkeypatch):
    config = search_with("automl.budget.parallel=1", "automl.budget.unit_minutes=0.1")
    study = driven(config, MemoryLog(), Machine(monkeypatch, lambda _: 5.0, preparing=500.0))
    assert whole(study) == names_of(config)
    machine = Machine(monkeypatch, lambda place: 7.0 if place == 0 else 5.0, preparing=500.0)
    late = driven(config, MemoryLog(), machine)
    assert machine.stopped == [0]
    assert late.history.trials[0].error.startswith("killed after 6.1 s: it may take 6 s")


@pytest.mark.slow
def test_first_preparation_has_the_time_of_the_search(monkeypatch):
    config = search_with("automl.budget.parallel=1", "automl.budget.hours=0.5")
    machine = Machine(monkeypatch, lambda _: 5.0, preparing=1e9)
    study = driven(config, MemoryLog(), machine, starting=10.0)
    assert 1745 < study.elapsed < 1756
    # With more hours, it goes on.
    assert (machine.stopped, [*study.running]) == ([], [0])


@pytest.mark.parametrize("in_pods", [False, True])
@pytest.mark.parametrize(("starting", "expected"), [(0.0, "6 h"), (7200.0, "20 h")])
def test_first_preparation_has_a_limit_without_one_of_the_search(
    monkeypatch, starting, expected, in_pods
):
    monkeypatch.setattr(Machine, "poll", 600.0)
    monkeypatch.setattr(time_limit, "jobs_for", lambda _: ("cluster", "job") if in_pods else None)
    config = search_with("automl.budget.parallel=1")
    machine = Machine(monkeypatch, lambda _: 5.0, preparing=1e9)
    study = driven(config, MemoryLog(), machine, starting=starting)
    assert machine.stopped[0] == 0
    first = study.history.trials[0]
    assert (first.status, first.failure) == ("failed", "hang")
    assert f"it may take {expected} (to prepare the data; automl.budget." in first.error
    # One that is slow and goes on is not killed.
    slow = Machine(monkeypatch, lambda _: 5.0, preparing=20000.0)
    assert whole(driven(config, MemoryLog(), slow)) == names_of(config)
    if in_pods:
        # Nor is one whose pod waits for a node, once its data are there.
        waits = Machine(monkeypatch, lambda place: 1e5 if place == 2 else 5.0)
        assert whole(driven(config, MemoryLog(), waits)) == names_of(config)


def test_machine_that_starts_slowly_gets_as_much_time_for_the_winner(monkeypatch):
    config = search_with("automl.budget.parallel=1", "automl.budget.hours=0.05")
    machine = Machine(monkeypatch, lambda _: 2.0)
    study = driven(config, MemoryLog(), machine, starting=70.0)
    # Seventy seconds of 180: 4.5 times as many are not left.
    assert (study.history.trials, 70 <= study.elapsed < 71) == ([], True)
    longer = search_with("automl.budget.parallel=1", "automl.budget.hours=0.1")
    study = driven(longer, MemoryLog(), Machine(monkeypatch, lambda _: 8.0), starting=30.0)
    assert study.history.trials[0].began == pytest.approx(30.0)
    assert 180 < study.elapsed < 226


def test_first_configuration_is_whole_even_if_what_follows_has_no_time(monkeypatch):
    # The first unit waits 40 s for the data, so the winner seems to take as long again.
    config = search_with("automl.budget.parallel=1", "automl.budget.hours=0.04")
    machine = Machine(monkeypatch, lambda _: 3.0, preparing=40.0)
    study = driven(config, MemoryLog(), machine, starting=12.0)
    assert whole(study) == names_of(config)[:1]
    statuses = {it.status for it in study.history.trials[FOLDS:]}
    assert statuses <= {"skipped"}
    # Six times the start is left for its run.
    assert study.elapsed < 144 - 6 * 12


@pytest.mark.parametrize(("preparing", "trained"), [(0.0, 0), (1e9, 0)])
def test_limit_that_is_too_short_is_refused_with_one_that_is_not(
    monkeypatch, tmp_path, preparing, trained
):
    hours = 0.02 if not preparing else 0.05
    short = search_with("automl.budget.parallel=1", f"automl.budget.hours={hours}")
    log = MemoryLog()
    machine = Machine(monkeypatch, lambda _: 2.0, preparing=preparing)
    study = driven(short, log, machine, starting=15.0)
    assert len(whole(study)) == trained
    assert not preparing or study.elapsed < 181
    with pytest.raises(BadInput, match=f"automl.budget.hours = {hours}: the search has no") as told:
        won(study, tmp_path)
    enough = float(re.search(r"set it to (\S+) or more", told.value.remedy).group(1))
    assert enough > hours
    longer = search_with("automl.budget.parallel=1", f"automl.budget.hours={enough}")
    again = driven(longer, log, Machine(monkeypatch, lambda _: 2.0), starting=15.0)
    assert whole(again)[:1] == names_of(longer)[:1]


def test_limit_that_is_too_short_for_any_model_is_refused_before_work(monkeypatch, tmp_path):
    rows = [f"{n},{n % 3},{'ab'[n % 2]}" for n in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["x,z,y", *rows]) + "\n")
    source = [f"data.source=[{tmp_path / 't.csv'}]", "data.target=y", f"output={tmp_path / 'out'}"]
    config = as_automl(named(load("tabular", [*source, "automl.budget.hours=1e-4"])))

    def work(line):
        raise AssertionError(line)

    trials = SyntheticTrials(World())
    monkeypatch.setattr(search, "trials_for", lambda *_: trials)
    study = search.search(config, MemoryLog(), Quiet(), work, **of_search(config))
    assert trials.closed
    assert not trials.world.reached
    with pytest.raises(
        BadInput, match=r"automl\.budget\.hours = 0\.0001: the search has no winner"
    ):
        won(study, tmp_path / "study")


def test_search_without_a_winner_says_which_limits_its_models_miss(monkeypatch, tmp_path):
    config = search_with()
    row = SimpleNamespace(configuration=Configuration("linear", "linear", {}), missed="2 ms, above")
    board = SimpleNamespace(rows=[row], weights={}, skipped={"trees": "it ended"})
    monkeypatch.setattr(step, "board_of", lambda *_: board)
    study = SimpleNamespace(config=config, out_of_time=False)
    with pytest.raises(SteadytrainError, match="no winner: linear misses a limit: 2 ms, above"):
        won(study, tmp_path)
    monkeypatch.setattr(step, "board_of", lambda *_: None)
    dear = search_with("automl.budget.usd=0.01", "compute.price_per_hour=1")
    spent = SimpleNamespace(config=dear, out_of_time=False, spent_out=lambda: True)
    with pytest.raises(SteadytrainError, match=r"no winner: automl\.budget\.usd = 0\.01 is spent"):
        won(spent, tmp_path)


@pytest.mark.parametrize(
    ("limits", "units"),
    [
        (["automl.budget.trials=3"], 12),
        (["automl.budget.trials=3", "automl.repeats=2"], 24),
        (["automl.budget.trials=3", "automl.budget.units=100"], 12),
        (["automl.budget.trials=30", "automl.budget.units=100"], 100),
        ([], 32),
    ],
)
def test_budget_counts_configurations_or_units(limits, units):
    assert search_with(*limits).tune.budget.trials == units


def test_units_that_are_too_few_for_one_configuration_are_refused():
    with pytest.raises(BadInput, match=r"units = 3: a configuration is trained 4 times") as few:
        search_with("automl.budget.units=3")
    assert "at least 4" in few.value.remedy


@pytest.mark.slow
def test_preparation_that_hangs_ends_too(monkeypatch):
    for minutes, expected in ((0.1, "10 min"), (2, "20 min")):
        config = search_with("automl.budget.parallel=1", f"automl.budget.unit_minutes={minutes}")
        machine = Machine(monkeypatch, lambda _: 5.0, preparing=1e9)
        study = driven(config, MemoryLog(), machine)
        assert machine.stopped == [0]
        first = study.history.trials[0]
        assert (first.status, first.failure) == ("failed", "hang")
        assert f"it may take {expected} (10 times automl.budget.unit_minutes to" in first.error

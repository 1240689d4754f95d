"""Trials on this machine: cuts, discards, failures, and deaths of every process involved."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from steadytrain.components.shared.config import load
from steadytrain.components.shared.events.types import LatencyMeasured
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tune.trials.base import Trials
from steadytrain.components.tune.trials.folder import TrialFolder, trials_of
from steadytrain.components.tune.trials.local import local_trials

from support import trials as support
from support.command import TINY_LM, wait_for
from support.forked import train
from support.pause import Pause
from support.snippets import blocks
from support.training import (
    LLAMA,
    Bench,
    events_of,
    language_rows,
    weights_digest,
    write_data,
)

RECIPE = {
    "max_steps": 24,
    "global_batch_size": 4,
    "micro_batch_size": 2,
    "learning_rate": 5e-3,
    "eval_steps": 4,
    "save_steps": 6,
    "logging_steps": 1,
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, data):
    """Return a function that makes a configuration of a trial."""

    def make(task="causal_lm", rows=data, model=LLAMA, ranks=1, tune=None, **training):
        return Bench.make(
            tmp_path_factory.mktemp("recipe"),
            rows.model_copy(update={"task": task}),
            model={"config": model},
            training={**RECIPE, **training},
            compute={"device": "cpu", "nproc_per_node": ranks, "threads_per_rank": 1},
            recovery={"backoff_seconds": 0},
            tune=tune or {},
        )

    return make


@pytest.fixture(scope="module")
def halt(tmp_path_factory):
    """Pause the ranks of the study's trials, at a step that a test sets, until asked to stop."""
    halt = Pause(tmp_path_factory.mktemp("halt") / "pause", 0, "TrainingStep", stoppable=True)
    halt.set(None)
    return halt


@pytest.fixture(scope="module")
def study(tmp_path_factory, recipe, halt):
    """Return a study's folder, its trials, and a function that asks for one."""
    folder = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as patch:
        halt.set_everywhere(patch)
        patch.setenv("FAULTS", "forward:0")
        found: Trials = local_trials(folder, parallel=2)
        assert found.attach() == frozenset()

        def ask(number, until, task="causal_lm", **how):
            bench = recipe(task, **how)
            support.share_data(folder, bench.config, bench.data)
            found.train(number, bench.config, until)

        yield folder, found, ask
        found.close()
    assert not support.processes(folder)


def test_search_of_the_documentation(tmp_path, monkeypatch):
    """It also prepares real data, which the other trials here are given."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (block,) = (item for item in blocks("python") if "def halve(" in item.text)
    names = {}
    exec(block.text, names)
    times = ("training.max_steps=8", "training.eval_steps=2", "training.save_steps=8")
    sets = (*TINY_LM, *times, "data.source=[package:json,package:email]", "compute.device=cpu")
    assert names["halve"]([1e-2, 1e-9, 1e-8], tmp_path, [2, 4, 8], sets) == 1e-2
    assert not support.processes(tmp_path)
    trials = local_trials(tmp_path)
    states = [trials.state(number) for number in range(3)]
    assert [state.condition for state in states].count("finished") == 1
    assert sorted(len(state.validations) for state in states) == [1, 2, 4]
    (shared,) = (tmp_path / "data").iterdir()
    (record,) = (trials_of(tmp_path) / "data").glob("*.json")
    data = DataRecord.load(record)
    whole = DataRecord.load(tmp_path / "runs" / "prepare" / "records" / "preprocess.json")
    assert (data.fingerprint, whole.folder) == (whole.fingerprint, str(shared))
    linked = {path.name for path in Path(data.folder).rglob("*") if path.is_file()}
    assert not linked & {*whole.sides["test"].shards, whole.sides["test"].index}
    assert whole.test_records not in linked


def weights(folder, number):
    return weights_digest(TrialFolder(folder, number).workspace)


def test_promoted_trial_is_the_run_that_was_never_paused(study, recipe):
    """Three trials on two slots: one is promoted twice, another trains to the end at once."""
    folder, trials, ask = study
    assert trials.state(0).condition == "new"
    limited = {"constraints": {"latency_ms": 1e6}}
    for number, until, tune in ((0, 4, limited), (1, 24, None), (2, 4, None)):
        ask(number, until, tune=tune)
    ask(0, 4, tune=limited)
    for until in (4, 12, 24):
        ask(0, until, tune=limited)
        found = support.ended(trials, 0)
        assert (found.condition, found.step) == ("finished" if until == 24 else "paused", until)
        assert [item.step for item in found.validations] == [*range(4, until + 1, 4)]
    whole, other = support.ended(trials, 1), support.ended(trials, 2)
    assert (whole.condition, other.condition, other.step) == ("finished", "paused", 4)
    assert found.validations == whole.validations
    assert 0 < whole.seconds < found.seconds
    alone = recipe()
    train(alone)
    assert weights(folder, 0) == weights(folder, 1) == weights_digest(alone.workspace)
    # The limit changes no weights, and only the first of three attempts measures the latency.
    (measured,) = events_of(TrialFolder(folder, 0).workspace, LatencyMeasured)
    assert 0 < measured.milliseconds == found.latency_ms
    assert whole.latency_ms is None


def test_cut_that_is_reached_is_not_trained_again(study):
    _, trials, ask = study
    before = trials.state(2)
    ask(2, 4)
    assert trials.state(2) == before


def test_discarded_trial_keeps_its_record_alone(study):
    folder, trials, _ = study
    before = support.ended(trials, 1)
    trials.discard(1)
    (left,) = TrialFolder(folder, 1).path.iterdir()
    metrics = sum(len(str(item.metrics)) for item in before.validations)
    assert left.stat().st_size < 300 + 40 * len(before.validations) + metrics
    assert trials.state(1) == before
    assert local_trials(folder).state(1) == before


def test_trial_that_is_stopped_keeps_its_checkpoint(study, halt):
    folder, trials, ask = study
    halt.set(2)
    ask(3, 24)
    wait_for(lambda: trials.state(3).step >= 2)
    trials.stop(3)
    stopped = trials.state(3)
    assert (stopped.condition, stopped.failure) == ("paused", "")
    assert stopped.step == support.steps(folder, 3)[-1] >= 2
    trials.discard(3)


def test_trial_that_runs_out_of_memory_says_what_helped(study, tmp_path):
    _, trials, ask = study
    rows = language_rows(24)
    for row in rows:
        times = 384 // len(row["input_ids"])
        row |= {name: content * times for name, content in row.items()}
    long = write_data(tmp_path, rows, rows[:2], sequence_length=384)
    wide = {**LLAMA, "hidden_size": 128, "intermediate_size": 4096, "max_position_embeddings": 512}
    ask(4, 2, "support.faults:RunsOut", rows=long, model=wide, max_steps=2, micro_batch_size=4)
    found = support.ended(trials, 4)
    assert (found.condition, found.step, found.failure) == ("finished", 2, "")
    assert found.fallbacks == ("smaller micro-batch",)


def test_trial_with_two_ranks_pauses_and_resumes_as_well(study, recipe):
    folder, trials, ask = study
    for until in (4, 8):
        ask(5, until, ranks=2, max_steps=8)
        assert support.ended(trials, 5).step == until
    alone = recipe(ranks=2, max_steps=8)
    train(alone)
    assert weights(folder, 5) == weights_digest(alone.workspace)


def test_trial_that_cannot_train_fails_with_its_class(study):
    _, trials, ask = study
    ask(6, 4, "support.faults:MissingField")
    found = support.ended(trials, 6)
    assert (found.condition, found.failure) == ("failed", "user_bug")
    assert "no_such_field" in found.error


def test_trial_whose_data_cannot_be_prepared_fails(study, recipe):
    _, trials, _ = study
    trials.train(7, recipe("support.faults:Paced").config, 4)
    found = support.ended(trials, 7)
    assert (found.condition, found.failure, found.step) == ("failed", "user_bug", 0)
    assert "data.sequence_length = 512" in found.error


def test_nothing_in_a_trial_names_the_test_side(study):
    folder, _, _ = study
    for path in trials_of(folder).rglob("preprocess.json"):
        record = DataRecord.load(path)
        assert record.sides.keys() == {"train", "validation"}
        assert (record.test_records, record.profile) == ("", None)


@pytest.fixture
def pause(tmp_path):
    """Pause the ranks of trials at step 5, until they are asked to stop."""
    return Pause(tmp_path / "pause", 5, "TrainingStep", stoppable=True)


@pytest.fixture
def killed(tmp_path, recipe, monkeypatch, pause):
    """Return a study's folder, and the file of a trial's configuration."""
    pause.set_everywhere(monkeypatch)
    bench = recipe(max_steps=100, eval_steps=20)
    config = tmp_path / "config.yaml"
    config.write_text(bench.config.to_yaml())
    folder = tmp_path / "study"
    support.share_data(folder, bench.config, bench.data)
    yield folder, config
    left = support.processes(folder)
    support.kill(left)
    assert not left


@pytest.fixture(scope="module")
def undisturbed(recipe):
    quick = recipe(max_steps=100, eval_steps=20)
    train(quick)
    return weights_digest(quick.workspace)


def reached(folder, step, program):
    def there():
        assert program.poll() is None
        return max(support.steps(folder, 0), default=0) >= step

    wait_for(there)


def kill_driver(folder, program):
    program.kill()


def kill_everything(folder, program):
    support.kill(support.processes(folder))
    program.kill()


def kill_template(folder, program):
    support.kill(support.templates(folder))


def kill_trials(folder, program):
    support.kill(support.supervisors(folder))


def kill_rank(folder, program):
    support.kill(support.ranks(folder)[:1])


KILLS = [kill_driver, kill_everything, kill_template, kill_trials, kill_rank]


def sweep(killed, pause, undisturbed, faults):
    """Kill something at each moment, drive again, and compare the weights.

    Args:
        faults: what to kill, after which step of trial 0. Ranks wait there.
    """
    folder, config = killed
    pause.set(faults[0][1])
    program = support.drive(folder, config, 100, [0, 1], linger=600)
    try:
        for (kill, step), later in zip(faults, [*faults[1:], (None, None)], strict=True):
            reached(folder, step, program)
            kill(folder, program)
            if kill in (kill_driver, kill_everything):
                program.wait()
                program = support.drive(folder, config, 100, [0, 1], linger=600)
            pause.set(later[1])
        assert program.wait(timeout=800) == 0
    finally:
        program.kill()
    assert not support.processes(folder)
    for number in (0, 1):
        support.check_alone(folder, number)
        assert weights(folder, number) == undisturbed
        state = local_trials(folder).state(number)
        assert (state.condition, state.step) == ("finished", 100)
        assert [item.step for item in state.validations] == [*range(20, 101, 20)]


def test_study_survives_the_death_of_each_of_its_processes(killed, pause, undisturbed):
    faults = [
        (kill_driver, 3),
        (kill_rank, 30),
        (kill_trials, 45),
        (kill_template, 60),
        (kill_everything, 75),
    ]
    sweep(killed, pause, undisturbed, faults)


@pytest.mark.soak
def test_study_survives_twenty_deaths(killed, pause, undisturbed):
    seed = int(os.environ.get("STEADYTRAIN_SOAK_SEED", "0"))
    chance = random.Random(seed)
    moments = sorted(chance.randrange(99) for _ in range(20))
    sweep(killed, pause, undisturbed, [(chance.choice(KILLS), step) for step in moments])


def test_next_driver_finds_the_trials_running(killed, pause):
    folder, config = killed
    program = support.drive(folder, config, 40, [0], linger=600)
    reached(folder, 5, program)
    program.send_signal(signal.SIGKILL)
    program.wait()
    trials = local_trials(folder, parallel=2)
    assert trials.attach() == {0}
    pause.set(None)
    trials.train(0, load(config), 40)
    found = support.ended(trials, 0)
    assert (found.condition, found.step) == ("paused", 40)
    assert support.steps(folder, 0) == [*range(1, 41)], "no step was trained twice"
    trials.close()


def test_without_a_driver_the_trials_stop_with_a_checkpoint(killed):
    folder, config = killed
    program = support.drive(folder, config, 100, [0], linger=0.5)
    reached(folder, 5, program)
    program.kill()
    program.wait()
    wait_for(lambda: not support.processes(folder))
    trials = local_trials(folder)
    assert trials.attach() == frozenset()
    found = trials.state(0)
    assert (found.condition, found.step) == ("paused", support.steps(folder, 0)[-1])

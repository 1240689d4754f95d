"""What a driver keeps of its trials on disk, and templates that cannot start."""

from __future__ import annotations

import math

import pytest

from steadytrain.components.shared.config import from_mapping, load
from steadytrain.components.shared.errors import SteadytrainError
from steadytrain.components.shared.events import Cursor
from steadytrain.components.shared.events.types import PodsPending, Warned
from steadytrain.components.train.agent.processes import processes_of
from steadytrain.components.tune.trials import local
from steadytrain.components.tune.trials.base import TrialState, Validation
from steadytrain.components.tune.trials.folder import TrialFolder, trials_of
from steadytrain.components.tune.trials.local import local_trials

from support import trials as support

DONE = TrialState("finished", 8, (Validation(8, {"loss": 0.5}),), 2.5, fallbacks=("offload",))


@pytest.fixture
def config():
    def make(**sections):
        content = {
            "name": "tiny",
            "data": {"source": ["unused"]},
            "model": {"config": {"model_type": "llama"}},
            "compute": {"device": "cpu"},
        }
        return from_mapping(content | sections)

    return make


def test_trial_is_a_run_in_a_folder_of_its_own(tmp_path, config):
    place = TrialFolder(tmp_path, 3)
    place.configure(config(), 4)
    own = load(place.config)
    assert (own.output, own.run_id) == (str(tmp_path / "trials" / "0003"), place.run)
    assert (own.compute.launcher, own.compute.threads_per_rank) == ("process", 4)


def test_trial_keeps_the_threads_that_it_began_with(tmp_path, config):
    place = TrialFolder(tmp_path, 3)
    for threads in (4, 2):
        place.configure(config(), threads)
    assert load(place.config).compute.threads_per_rank == 4


def test_trials_run_is_named_after_study_and_number(tmp_path):
    assert TrialFolder(tmp_path / "tiny-1a2b3c4d", 3).run == "tiny-1a2b3c4d-0003"


def test_what_a_trial_waits_for_and_warns_of_reaches_the_driver(tmp_path):
    place = TrialFolder(tmp_path, 3)
    place.workspace.create()
    stream = place.workspace.stream("supervisor")
    stream.emit(Warned(stage="train", message="known to the driver before"))
    said = []
    trial = local._Trial(Cursor(place.workspace.events), said.append)
    stream.emit(PodsPending(attempt=1, job="small-0003-a1", reason="exceeded quota: memory"))
    stream.emit(Warned(stage="train", message="slow disk"))
    stream.close()
    trial.state()
    assert said == ["small-0003-a1 waits: exceeded quota: memory", "slow disk"]


def test_studies_with_unusual_names_have_runs_with_valid_names_of_their_own(tmp_path, config):
    names = ["Of 2026_07", "of-2026-07", "x" * 52, f"{'x' * 51}y", "_"]
    places = [TrialFolder(tmp_path / name, 12_345) for name in names]
    for place in places:
        place.configure(config(), 1)
    assert len({load(place.config).run_id for place in places}) == len(places)


def test_trials_of_one_study_have_their_checkpoints_apart(tmp_path, config):
    study = tmp_path / "study"
    places = set()
    for number in (0, 1):
        place = TrialFolder(study, number)
        place.configure(config(recovery={"checkpoints": "s3://bucket/all/"}), 1)
        places.add(load(place.config).recovery.checkpoints)
    assert places == {"s3://bucket/all/study-0000", "s3://bucket/all/study-0001"}


def test_discarded_trial_leaves_nothing_but_its_record(tmp_path, config):
    checkpoints = tmp_path / "elsewhere"
    place = TrialFolder(tmp_path / "study", 0)
    place.configure(config(recovery={"checkpoints": str(checkpoints)}), 1)
    saved = checkpoints / "study-0000" / place.run / "step-00000008"
    for path in (place.workspace.model / "weights", place.log, saved):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(10_000))
    place.discard(DONE)
    assert list(place.path.iterdir()) == [place.record]
    assert not saved.exists()
    assert local_trials(tmp_path / "study").state(0) == DONE


def test_trials_start_from_the_template_that_was_warmed_up(tmp_path, config):
    trials = local_trials(tmp_path, imports=["json"])
    trials.warm_up(config().compute)
    (template,) = processes_of(trials_of(tmp_path))
    trials.train(0, config(), 8)
    assert trials._trials[0].fork._server.pid == template.pid
    trials.close()
    assert processes_of(trials_of(tmp_path)) == []


ENDED = [DONE, TrialState("failed", 4, failure="crash"), TrialState("paused", 8)]


@pytest.mark.parametrize("state", ENDED, ids=lambda state: state.condition)
def test_discarded_trial_is_not_trained_again(tmp_path, config, state):
    """A log that lost its last records asks for it."""
    TrialFolder(tmp_path, 0).discard(state)
    trials = local_trials(tmp_path)
    trials.train(0, config(training={"max_steps": 16, "eval_steps": 4}), 8)
    assert trials.state(0) == state


def test_trial_killed_after_its_last_step_starts_again(tmp_path, config, monkeypatch):
    trials, asked = local_trials(tmp_path), []
    monkeypatch.setattr(trials, "state", lambda _: TrialState("paused", 8))
    monkeypatch.setattr(trials, "_start", lambda *request: asked.append(request[0]))
    settings = config(training={"max_steps": 8, "eval_steps": 4})
    trials.train(0, settings, 4)
    assert asked == []
    trials.train(0, settings, 8)
    assert asked == [0]


def test_discarded_trial_that_has_to_go_on_begins_again(tmp_path, config, monkeypatch):
    place = TrialFolder(tmp_path, 0)
    place.discard(TrialState("paused", 4))
    trials, asked = local_trials(tmp_path), []
    monkeypatch.setattr(trials, "_start", lambda *request: asked.append(request[0]))
    trials.train(0, config(), 8)
    assert asked == [0]
    assert place.config.exists()
    assert local_trials(tmp_path).state(0).condition == "new"


def test_discarded_trial_may_have_diverged(tmp_path):
    place = TrialFolder(tmp_path, 0)
    diverged = Validation(4, {"loss": math.inf, "perplexity": -math.inf})
    place.discard(TrialState("failed", 4, (diverged,), failure="divergence"))
    assert local_trials(tmp_path).state(0).validations == (diverged,)
    place.discard(TrialState("failed", 4, (Validation(4, {"loss": math.nan}),)))
    (found,) = local_trials(tmp_path).state(0).validations
    assert math.isnan(found.metrics["loss"])


def test_discard_that_was_interrupted_is_finished_by_the_next_driver(tmp_path, config, monkeypatch):
    place = TrialFolder(tmp_path, 0)
    place.configure(config(), 1)
    place.workspace.model.mkdir(parents=True)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("steadytrain.components.shared.storage.local.LocalStorage.clear", killed)
        with pytest.raises(KeyboardInterrupt):
            place.discard(DONE)
    assert place.workspace.model.exists()
    trials = local_trials(tmp_path)
    assert trials.attach() == frozenset()
    assert trials.state(0) == DONE
    assert list(place.path.iterdir()) == [place.record]


@pytest.mark.slow
def test_template_that_hangs_does_not_keep_the_driver_from_stopping_a_trial(
    tmp_path, config, monkeypatch
):
    monkeypatch.setattr(TrialFolder, "stop_seconds", 0.1)
    trials = local_trials(tmp_path)
    trials.attach()
    trials.train(0, config(), 4)
    (template,) = processes_of(trials_of(tmp_path))
    template.suspend()

    trials.stop(0)

    assert not processes_of(trials_of(tmp_path))
    trials.close()


@pytest.mark.slow
def test_template_that_cannot_start_is_an_error_that_names_its_log(tmp_path, config, monkeypatch):
    monkeypatch.setattr(local, "PROGRAM", "steadytrain.no_such_program")
    trials = local_trials(tmp_path)
    trials.attach()
    trials.train(0, config(), 4)
    with pytest.raises(SteadytrainError, match="ended 3 times before it was ready") as error:
        support.ended(trials, 0)
    log = trials_of(tmp_path) / "log"
    assert str(log) in error.value.remedy
    assert "no_such_program" in log.read_text()
    trials.close()

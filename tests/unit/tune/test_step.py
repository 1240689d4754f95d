"""The steps of the pipeline `tune`: their events, their results, and what the exit handler does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from kfp import dsl

from steadytrain.components.preprocess.inputs import inputs_of
from steadytrain.components.report.facts import gather
from steadytrain.components.report.story import outcome
from steadytrain.components.shared.config import DataConfig, from_mapping, load
from steadytrain.components.shared.errors import (
    BadInput,
    RunBusy,
    SteadytrainError,
    TrainingFailed,
)
from steadytrain.components.shared.records import DataRecord, TrainRecord
from steadytrain.components.shared.stage import stage
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.tune import search, step
from steadytrain.components.tune.component import train_winner
from steadytrain.components.tune.driver import driving, study_folder
from steadytrain.components.tune.results import Lines
from steadytrain.components.tune.step import conclude
from steadytrain.components.tune.trials import retrain
from steadytrain.components.tune.trials.folder import known_data

from support.stores import copy_store
from support.synthetic_trials import SPACE, SyntheticTrials, World


@pytest.fixture
def config(tmp_path, empty_store):
    copy_store(empty_store, tmp_path)

    def make(**tune):
        return from_mapping(
            {
                "name": "tiny",
                "run": "study",
                "output": str(tmp_path),
                "data": {"source": ["a.txt"]},
                "model": {"config": {"model_type": "llama"}},
                "training": {"max_steps": 90, "eval_steps": 10, "learning_rate": 3e-3},
                "recovery": {"lease_seconds": 0.5},
                "tune": {"space": SPACE, "budget": {"trials": 6}, "seeds": 2, **tune},
            }
        )

    return make


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data" / "f"
    folder.mkdir(parents=True)
    for name in ("train.parquet", "test.parquet"):
        (folder / name).write_bytes(b"rows")
    side = {"shards": ["train.parquet"], "documents": 1, "rows": 1, "tokens": 1}
    test = {**side, "shards": ["test.parquet"]}
    return DataRecord.model_validate(
        {"folder": str(folder), "fingerprint": "f", "task": "causal_lm"}
        | {"sides": {"train": side, "test": test}, "test_records": "", "split_digest": "s"}
    )


@pytest.fixture
def world(monkeypatch):
    world = World()
    monkeypatch.setattr(search, "trials_for", lambda *_: SyntheticTrials(world))
    return world


@pytest.fixture
def scores(monkeypatch):
    """Validation scores of the winner by seed. A seed without one fails."""
    scores = {43: 0.5, 44: 0.4}

    def train(config):
        seed = config.training.seed
        workspace = Workspace.of(config)
        workspace.create()
        workspace.stream("begin").close()
        workspace.events.mkdir(exist_ok=True)
        if seed not in scores:
            raise TrainingFailed("it broke", failure_class="user_bug")
        return SimpleNamespace(best_score=scores[seed], metric="loss")

    monkeypatch.setattr(retrain, "_train", train)
    return scores


def begin(config):
    """Begin the study's run as the preprocess step does."""
    with stage(config, "begin") as current:
        current.workspace.config.write_text(config.to_yaml())


def records(config):
    """How many records a study's log holds."""
    return len((study_folder(config) / "log.jsonl").read_text().splitlines())


def standing(config):
    return outcome(gather(Workspace.of(config)))


def test_step_that_reads_other_data_than_were_prepared_trains_nothing(
    config, data, world, tmp_path
):
    (tmp_path / "a.txt").write_text("changed since")
    made = config()
    made = made.model_copy(update={"data": DataConfig(source=[str(tmp_path / "a.txt")])})
    with pytest.raises(BadInput, match="does not read what the preprocess step prepared"):
        step.run(made, data.model_copy(update={"inputs_digest": "0" * 64}))
    assert not (study_folder(made) / "trials").exists()
    assert not world.trained


@pytest.mark.slow
def test_study_of_the_step_is_what_the_command_would_find(config, data, world, capsys):
    made = config()
    step.run(made, data)
    folder = study_folder(made)
    found = json.loads((folder / "tuning.json").read_text())
    assert found["trials"] == 6
    assert load(folder / "best.yaml").training.max_steps == 90
    assert (folder / "report.html").is_file()
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("trial 0: reached step") for line in lines)


@pytest.mark.slow
def test_trials_get_the_data_of_the_preprocess_step_without_the_test_side(config, data, world):
    made = config()
    step.run(made, data)
    shared = known_data(study_folder(made), made)
    assert shared.fingerprint == data.fingerprint
    assert shared.sides.keys() == {"train"}


def test_only_a_new_study_imports_for_its_trials_before_one_starts(config, data, world):
    for _ in range(2):
        with driving(config()) as log:
            search.search(config(), log, Lines(lambda _: None), lambda _: None, data=data)
        assert world.warmed_up == 1


def test_trials_without_their_log_are_refused_because_they_may_be_of_other_data(
    config, data, world
):
    trial = study_folder(config()) / "trials" / "0000"
    trial.mkdir(parents=True)
    with driving(config()) as log:
        with pytest.raises(BadInput, match="holds 1 trials, and the study's log is empty") as lost:
            search.search(config(), log, Lines(lambda _: None), lambda _: None, data=data)
        assert "remove that folder" in lost.value.remedy
        trial.rmdir()
        search.search(config(), log, Lines(lambda _: None), lambda _: None, data=data)
    assert records(config()) > 1


def test_trial_that_began_after_the_end_of_a_restored_log_begins_again(config, data, world):
    lines, made = [], config()
    for lost in ((), (study_folder(made) / "trials" / "0006" / "log",)):
        for path in lost:
            path.parent.mkdir(parents=True)
            path.write_text("of other parameters")
        with driving(made) as log:
            search.search(made, log, Lines(lambda _: None), lines.append, data=data)
    assert not (study_folder(made) / "trials" / "0006").exists()
    assert lines == ["trial 6 begins again: the log has lost that it began"]


def test_second_driver_is_refused_and_reports_nothing(config, data, world):
    made = config()
    with driving(made), pytest.raises(RunBusy):
        step.run(made, data)
    assert standing(made).state == "empty"


@pytest.mark.slow
@pytest.mark.parametrize("when", ["between two commands", "while it runs"])
def test_study_whose_data_change_is_refused_before_a_winner_trains_on_them(
    config, world, tmp_path, when
):
    source = tmp_path / "a.txt"
    source.write_text("before")
    made = config().model_copy(update={"data": DataConfig(source=[str(source)])})

    def drive(budget=6, change=""):
        def first():
            if change:
                source.write_text(change)
            return []

        update = {"budget": made.tune.budget.model_copy(update={"trials": budget})}
        larger = made.model_copy(update={"tune": made.tune.model_copy(update=update)})
        with driving(larger) as log:
            shown = Lines(lambda _: None)
            return search.search(larger, log, shown, lambda _: None, first=first)

    if when == "while it runs":
        with pytest.raises(BadInput, match="the data have changed since study 'study' began"):
            drive(change="after")
        source.write_text("before")
    assert len(drive().history.trials) == 6
    kept = (study_folder(made) / "log.jsonl").read_bytes()
    source.write_text("after")
    with pytest.raises(BadInput, match=r"a\.txt: the data have changed since study") as refused:
        drive(budget=8)
    assert "another name" in refused.value.remedy
    assert (study_folder(made) / "log.jsonl").read_bytes() == kept
    source.write_text("before")
    assert len(drive(budget=8).history.trials) == 8


@pytest.mark.slow
def test_step_without_a_space_or_a_finished_trial_fails_with_a_fix(config, data, world):
    with pytest.raises(BadInput, match=r"tune\.space") as nothing:
        step.run(config(space={}), data)
    assert "low: 1e-4" in nothing.value.remedy
    with pytest.raises(SteadytrainError, match="no trial finished") as early:
        step.run(config(budget={"trials": 6, "hours": 1e-4}), data)
    assert "raise tune.budget" in early.value.remedy


@pytest.mark.slow
def test_winner_is_the_best_of_the_seeds_that_did_not_fail(config, data, world, scores):
    made = config(seeds=3)
    step.run(made, data)
    assert standing(made).state == "unfinished", "the winner is still to be trained"
    best = load(study_folder(made) / "best.yaml")
    found = step.train_on_seeds(made, best, compared=6)
    assert found.config.training.seed == 44
    assert found.trained.keys() == {43, 44}
    winner = load(study_folder(made) / "winner.yaml")
    assert (winner.run_id, winner.gate.compared) == (found.config.run_id, 6)
    told = standing(made)
    assert told.state == "finished"
    assert winner.run_id in told.sentence


def test_winner_is_not_trained_on_data_that_changed_after_the_study(config, tmp_path, scores):
    source = tmp_path / "a.txt"
    source.write_text("what the study began with")
    made = config()
    made = made.model_copy(update={"data": DataConfig(source=[str(source)])})
    inputs = inputs_of(made).digest()
    with driving(made) as log:
        log.append({"kind": "opened", "study": "s", "queued": [], "inputs": inputs})
    assert step.train_on_seeds(made, made, compared=6).trained.keys() == {43, 44}
    source.write_text("what came later")
    with pytest.raises(BadInput, match="the data have changed since study 'study' began"):
        step.train_on_seeds(made, made, compared=6)


@pytest.mark.parametrize(
    ("searched", "compared"), [({"trials": 6}, 6), ({"trials": 12, "compared": 4}, 4)]
)
def test_component_that_trains_a_winner_writes_what_its_run_wrote(
    config, tmp_path, monkeypatch, searched, compared
):
    made = config().model_copy(update={"run": "winner"})
    record = TrainRecord(
        outcome="finished", model=str(tmp_path / "model"), weights_digest="w", metric="loss",
        best_score=0.4, best_step=60, steps=90, attempts=2, parameters=7, seconds=1.5,
    )  # fmt: skip
    calls = []

    def train(study, best, compared):
        calls.append((study.run_id, best.run_id, compared))
        return retrain.Trained(made, {made.training.seed: record, 1: None})

    monkeypatch.setattr(step, "train_on_seeds", train)
    workspace = Workspace.of(made)
    workspace.create()
    record.save(workspace.record("train"))
    workspace.record("preprocess").write_text("data")
    kinds = {"data": dsl.Dataset, "model": dsl.Model, "result": dsl.Metrics}
    names = ("resolved", "best", "summary", "winner", *kinds)
    artifacts = {
        name: kinds.get(name, dsl.Artifact)(name=name, uri=str(tmp_path / name)) for name in names
    }
    Path(artifacts["summary"].path).write_text(json.dumps(searched))
    for name, run in (("resolved", "study"), ("best", "trial")):
        content = config().model_copy(update={"run": run}).to_saved()
        Path(artifacts[name].path).write_bytes(content)
    train_winner.python_func(**artifacts)
    assert calls == [("study", "trial", compared)]
    assert json.loads(Path(artifacts["summary"].path).read_bytes()) == searched
    assert load(Path(artifacts["winner"].path)).run_id == artifacts["winner"].metadata["run"]
    assert Path(artifacts["data"].path).read_text() == "data"
    assert TrainRecord.load(Path(artifacts["model"].path)) == record
    assert artifacts["model"].metadata["weights_digest"] == "w"
    assert artifacts["result"].metadata == {
        "best_loss": 0.4, "best_step": 60, "steps": 90, "attempts": 2, "seconds": 1.5,
        "seed": made.training.seed,
    }  # fmt: skip


@pytest.mark.slow
def test_study_without_seeds_is_complete_after_the_search(config, data, world):
    made = config(seeds=0)
    begin(made)
    step.run(made, data)
    assert standing(made).state == "finished"


@pytest.fixture
def concluded(monkeypatch):
    """The calls of the exit handler: what it removes, and on which runs it reports."""
    calls = []

    def remove(config, job):
        calls.append(("remove", config.run_id, job))
        return []

    def report(config, job, *, progress):
        calls.append(("report", config.run_id, job, progress))
        return "page"

    monkeypatch.setattr(step, "remove_unfinished", remove)
    monkeypatch.setattr(step, "report", report)
    return calls


@pytest.mark.slow
def test_exit_handler_reports_on_the_study_and_on_its_winner(
    config, data, world, scores, concluded
):
    made = config()
    step.run(made, data)
    best = load(study_folder(made) / "best.yaml")
    winner = step.train_on_seeds(made, best, compared=6).config
    named = retrain.named_after(made, best)
    runs = [retrain.on_seed(named, seed, 6).run_id for seed in (43, 44)]
    assert all(run.startswith("study-") for run in runs)
    assert conclude(made, "job-1") == "page"
    assert concluded == [
        *(("remove", run, "job-1") for run in runs),
        ("report", "study", "job-1", records(made)),
        ("report", winner.run_id, "job-1", None),
    ]


@pytest.mark.slow
def test_pipeline_that_lost_a_step_is_submitted_again_for_that_step_alone(
    config, data, world, scores, concluded
):
    made = config()
    step.run(made, data)
    best = load(study_folder(made) / "best.yaml")
    winner = step.train_on_seeds(made, best, compared=6).config
    begin(made)
    conclude(made, "job-2")
    assert [call[:3] for call in concluded[-2:]] == [
        ("report", "study", "job-2"),
        ("report", winner.run_id, ""),
    ]


@pytest.mark.slow
def test_exit_handler_leaves_a_study_alone_that_another_driver_works_on(
    config, data, world, concluded
):
    made = config()
    step.run(made, data)
    with driving(made):
        page = conclude(made, "job-1")
    assert page == Workspace.of(made).report
    assert page.is_file()
    assert concluded == []


@pytest.mark.slow
def test_exit_handler_reports_on_a_study_with_a_damaged_log(config, data, world, concluded, capsys):
    made = config()
    step.run(made, data)
    log = study_folder(made) / "log.jsonl"
    log.write_text(log.read_text().replace('"kind":"started"', '"kind":"begun"', 1))
    assert conclude(made, "job-1") == "page"
    assert concluded == [("report", "study", "job-1", 0)]
    assert "log is damaged" in capsys.readouterr().err


@pytest.mark.slow
def test_the_report_needs_nothing_that_only_the_image_for_training_has() -> None:
    """Its image has no torch, no Optuna and no libraries that train."""
    code = (
        "import sys; sys.modules |= dict.fromkeys(('torch', 'optuna', 'sklearn', 'lightgbm'));"
        "import steadytrain.components.tune.step, steadytrain.components.automl.step"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

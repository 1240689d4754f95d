"""`steadytrain tune`: what it prints, what it writes, and what it refuses."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import yaml
from typer.testing import CliRunner

import steadytrain.components.tune.search as runner
from steadytrain.components.shared.config import load
from steadytrain.components.shared.errors import BadInput, ConfigError, SteadytrainError
from steadytrain.components.tune.trials import retrain as retraining
from steadytrain.pipelines.cli import app

from support.snippets import documented
from support.synthetic_trials import SPACE, SyntheticTrials, World

SETTINGS = {
    "name": "tiny",
    "data": {"source": ["a.txt"]},
    "model": {"config": {"model_type": "llama"}},
    "training": {"max_steps": 90, "eval_steps": 10, "learning_rate": 3e-3, "global_batch_size": 4},
    "compute": {"price_per_hour": 36.0},
    "tracking": {"sinks": []},
    "tune": {"space": SPACE, "budget": {"trials": 12}, "seeds": 0},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(SETTINGS))
    (tmp_path / "a.txt").write_text("the data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def world(monkeypatch):
    world = World()
    monkeypatch.setattr(runner, "local_trials", lambda study, **_: SyntheticTrials(world))
    return world


def steadytrain(*arguments):
    """What the command prints. Errors are raised, as in a program."""
    done = CliRunner().invoke(app, ["tune", *map(str, arguments), "--output", "out"])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.stdout


def test_study_ends_with_a_configuration_that_run_takes(folder, world):
    told = json.loads(steadytrain("tiny.yaml", "--json"))
    place = folder / "out" / "studies" / told["study"]
    best = load(place / "best.yaml")
    assert best.training.learning_rate == told["best_params"]["training.learning_rate"]
    assert not best.tune.space
    written = json.loads((place / "tuning.json").read_text())
    assert told | written == told
    assert set(told) == documented("tune")
    assert written["trials"] == 12
    assert written["trials_completed"] >= 1
    assert written["usd"] == pytest.approx(written["seconds"] / 100)


def test_trial_0_has_the_configurations_own_values(folder, world):
    steadytrain("tiny.yaml")
    assert world.configs[0].training.learning_rate == 3e-3
    assert world.configs[0].training.weight_decay == 0.0


def test_each_trial_has_its_line_with_the_best_so_far_and_what_is_left(folder, world):
    lines = steadytrain("tiny.yaml").splitlines()
    assert lines[0].startswith("study tiny-")
    assert "trial 0: learning_rate 0.003000, weight_decay 0" in lines
    assert re.match(
        r"trial 0: reached step \d+, loss [\d.]+ \| trials left: 11, about .*\$", lines[2]
    )
    assert any("best" in line and "(trial" in line for line in lines)
    assert lines[-1].startswith("folder ")


def test_same_command_continues_and_a_larger_budget_adds_trials(folder, world):
    first = json.loads(steadytrain("tiny.yaml", "--json"))
    again = json.loads(steadytrain("tiny.yaml", "--json"))
    assert again == first
    more = json.loads(steadytrain("tiny.yaml", "--set", "tune.budget.trials=20", "--json"))
    assert (more["study"], more["trials"]) == (first["study"], 20)


def test_another_study_starts_from_the_best_of_an_earlier_one(folder, world, monkeypatch):
    first = json.loads(steadytrain("tiny.yaml", "--json"))
    other = World()
    monkeypatch.setattr(runner, "local_trials", lambda study, **_: SyntheticTrials(other))
    steadytrain("tiny.yaml", "--set", "tune.seed=1", "--from", first["study"])
    assert other.configs[1].training.learning_rate == pytest.approx(
        first["best_params"]["training.learning_rate"]
    )
    with pytest.raises(BadInput, match=f"(?s)no such study.*{first['study']}"):
        steadytrain("tiny.yaml", "--set", "tune.seed=2", "--from", "nothing")


def test_dry_run_shows_rungs_budget_cost_and_three_trials_and_writes_nothing(folder):
    shown = steadytrain("tiny.yaml", "--dry-run")
    rungs = "hyperband: 10, 30, 90 steps, 3 brackets"
    for words in (rungs, "20,480, 61,440, 184,320 tokens", "12 trials", "of training on", "$"):
        assert words in shown
    assert len(re.findall(r"^trial \d", shown, re.MULTILINE)) == 3
    told = json.loads(steadytrain("tiny.yaml", "--dry-run", "--json"))
    assert set(told) == documented("tune --dry-run")
    assert told["rungs"] == [10, 30, 90]
    assert told["rung_tokens"] == [20_480, 61_440, 184_320]
    assert len(told["samples"]) == 3
    assert not (folder / "out").exists()


def test_cost_of_a_tiny_study_is_not_shown_as_nothing(folder):
    tiny = ("--set", "tune.budget.trials=1", "--set", "compute.price_per_hour=0.01")
    # The estimate is for this machine, which may have no GPU.
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    for name, value in {**sizes, "vocab_size": 600}.items():
        tiny += ("--set", f"model.config.{name}={value}")
    shown = steadytrain("tiny.yaml", "--dry-run", *tiny)
    assert re.search(r"^cost +.*, less than \$0\.01 \(formula\)$", shown, re.MULTILINE)
    assert "about 0 s" not in shown


def test_study_without_a_space_is_an_error_with_an_example(folder):
    with pytest.raises(BadInput, match=r"(?s)tune\.space.*low: 1e-4"):
        steadytrain("tiny.yaml", "--set", "tune.space={}")


def test_wrong_space_is_found_before_anything_starts(folder, world):
    with pytest.raises(ConfigError, match="did you mean"):
        steadytrain("tiny.yaml", "--set", "tune.space={training.lerning_rate: {low: 1, high: 2}}")
    assert not world.configs


def test_winner_is_trained_on_seeds_that_no_trial_had(folder, world, monkeypatch):
    calls = []

    def retrain(best, seeds, *, compared, greater_is_better):
        calls.append((best.training.learning_rate, list(seeds), compared, greater_is_better))
        gate = SimpleNamespace(promoted=True, reason="better")
        return SimpleNamespace(config=best, gate=gate)

    monkeypatch.setattr(retraining, "retrain", retrain)
    told = json.loads(steadytrain("tiny.yaml", "--set", "tune.seeds=2", "--json"))
    rate = told["best_params"]["training.learning_rate"]
    assert calls == [(rate, [43, 44], 12, False)]
    assert (told["promoted"], told["gate"]) == (True, "better")


def test_study_in_which_no_trial_finishes_fails(folder, world):
    with pytest.raises(SteadytrainError, match="no trial finished"):
        steadytrain("tiny.yaml", "--set", "tune.budget.hours=0.0001")


@pytest.mark.slow
def test_study_is_written_to_an_optuna_storage_again_and_again(folder, world):
    import optuna

    for _ in range(2):
        told = json.loads(steadytrain("tiny.yaml", "--export-optuna", "sqlite:///o.db", "--json"))
    study = optuna.load_study(study_name=told["study"], storage="sqlite:///o.db")
    assert len(study.trials) == 12
    assert study.best_value == pytest.approx(told["best_score"])
    with pytest.raises(BadInput, match="--export-optuna"):
        steadytrain("tiny.yaml", "--run", "never", "--export-optuna", "nothing://")
    address = "no such://h/db?password=hunter2hunter2"
    with pytest.raises(BadInput, match=r"password=\[redacted\]: ") as caught:
        steadytrain("tiny.yaml", "--run", "never", "--export-optuna", address)
    assert "hunter2" not in str(caught.value)
    assert not (folder / "out" / "studies" / "never").exists(), "rejected before anything trains"


def test_export_leaves_other_peoples_studies_alone(folder, world):
    import optuna

    optuna.create_study(study_name="theirs", storage="sqlite:///o.db")
    with pytest.raises(BadInput, match="has a study theirs that is not an export"):
        steadytrain("tiny.yaml", "--run", "theirs", "--export-optuna", "sqlite:///o.db")
    assert optuna.get_all_study_names("sqlite:///o.db") == ["theirs"]


class Page(HTMLParser):
    """Checks that tags are balanced and counts them."""

    def __init__(self):
        super().__init__()
        self.open, self.counts, self.addresses = [], {}, []

    def handle_starttag(self, tag, attributes):
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.addresses += [value for name, value in attributes if name in ("src", "href")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.counts[tag] = self.counts.get(tag, 0) + 1

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.slow
def test_report_shows_every_trial_and_loads_nothing(folder, world):
    world.failing = {3: "oom<b>"}
    told = json.loads(steadytrain("tiny.yaml", "--set", "tune.budget.trials=40", "--json"))
    text = (folder / "out" / "studies" / told["study"] / "report.html").read_text()
    page = Page()
    page.feed(text)
    assert not page.open
    assert not page.addresses
    assert page.counts["svg"] == 7  # curves, history, 2 bars, parallel coordinates, 2 slices
    assert page.counts["polyline"] >= 39
    assert "oom&lt;b&gt; (1)" in text
    for words in ("Learning curves", "PED-ANOVA", "Went on", "Training time"):
        assert words in text

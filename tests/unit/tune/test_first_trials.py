"""What a study tries first: the champion's parameters, or the configuration's own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from steadytrain.components.shared.config import load
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.tune import search
from steadytrain.components.tune.driver import driving
from steadytrain.components.tune.study import Study
from steadytrain.components.tune.trials.base import TrialState, Validation

from support.synthetic_trials import SPACE


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return load("causal-lm", [("tune.space", SPACE), ("output", str(tmp_path))])


@pytest.fixture
def champion(config, monkeypatch):
    """The registry's champion, whose run had another learning rate."""
    version = SimpleNamespace(tags={search.RUN: "earlier"})
    monkeypatch.setattr(search, "Registry", lambda *_: SimpleNamespace(champion=lambda: version))
    workspace = Workspace.of(config)
    workspace.tracking_store.touch()
    return Workspace(workspace.output, "earlier")


def test_without_a_registry_trial_0_has_the_configurations_own_values(config):
    assert search.first_trials(config) == [
        {"training.learning_rate": 3e-3, "training.weight_decay": 0.1}
    ]
    assert not Workspace.of(config).tracking_store.exists()


def test_field_that_is_left_open_is_sampled(config):
    content = load(config.to_yaml(), {"training.learning_rate": None})
    assert search.first_trials(content) == [{"training.weight_decay": 0.1}]


def test_trial_0_has_the_champions_parameters(config, champion):
    champion.folder.mkdir(parents=True)
    earlier = load("causal-lm", ["training.learning_rate=2e-3"])
    champion.config.write_text(earlier.to_yaml())
    assert search.first_trials(config)[0]["training.learning_rate"] == 2e-3


def test_champion_whose_run_is_elsewhere_is_left_out(config, champion):
    assert search.first_trials(config)[0]["training.learning_rate"] == 3e-3


def test_fields_that_do_not_vary_are_left_out_so_that_no_trial_is_queued_twice(config, champion):
    warmup = {"low": 0.0, "high": 0.3, "when": {"training.lr_scheduler_type": "cosine"}}
    scheduler = {"choices": ["cosine", "constant"]}
    space = {"training.warmup_steps": warmup, "training.lr_scheduler_type": scheduler}
    study = load(config.to_yaml(), {"tune.space": space, "run": "before"})
    with driving(study) as log:
        before = Study(study, log, first=lambda: [{"training.lr_scheduler_type": "constant"}])
        number = before.next().number
        before.report(number, TrialState("paused", 1, (Validation(1, {"loss": 1.0}),)))
    champion.folder.mkdir(parents=True)
    champion.config.write_text(load("causal-lm", ["training.lr_scheduler_type=constant"]).to_yaml())
    assert search.first_trials(study, "before") == [{"training.lr_scheduler_type": "constant"}]

"""Objectives in full runs: killed and resumed, and on two ranks."""

from __future__ import annotations

import hashlib

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from steadytrain.components.shared.events.types import CheckpointSaved

from support import selected
from support.forked import ForkedLauncher, train
from support.strategies import RECIPE, Case, on_two_ranks
from support.strategies import train as train_alone
from support.training import LLAMA, VOCABULARY, Bench

SMALL = {
    "max_steps": 12,
    "global_batch_size": 4,
    "micro_batch_size": 2,
    "learning_rate": 5e-3,
    "eval_steps": 4,
    "save_steps": 4,
    "logging_steps": 1,
}


def write_teacher(folder):
    torch.manual_seed(1)
    fields = {**LLAMA, "hidden_size": 48, "vocab_size": VOCABULARY}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def objectives(tmp_path_factory):
    """Return the fields of `training`, by objective."""
    teacher = str(write_teacher(tmp_path_factory.mktemp("teacher")))
    return {
        "distillation": {"distillation": {"teacher": teacher, "weight": 0.7}},
    }


class KillsOnce:
    """Kills rank 0 at the run's first checkpoint."""

    def __init__(self, launcher):
        self.launcher, self.done = launcher, False

    def emit(self, event):
        if isinstance(event, CheckpointSaved) and not self.done:
            self.done = True
            self.launcher.kill(0)

    def close(self):
        pass


def weights(folder, data, fields, *, killed):
    bench = Bench.make(
        folder,
        data,
        training={**SMALL, **fields},
        compute={"device": "cpu", "threads_per_rank": 1},
        recovery={"backoff_seconds": 0},
    )
    launcher = ForkedLauncher(1)
    outcome = train(bench, launcher=launcher, sinks=[KillsOnce(launcher)] if killed else [])
    assert (outcome.outcome, outcome.attempts) == ("finished", 1 + killed), outcome
    return hashlib.sha256((bench.workspace.model / "model.safetensors").read_bytes()).hexdigest()


@selected.each("name", ["distillation"], few=["distillation"])
def test_killed_run_ends_with_the_same_weights(tmp_path, data, objectives, name):
    whole, killed = (
        weights(tmp_path / str(killed), data, objectives[name], killed=killed)
        for killed in (False, True)
    )
    assert killed == whole


STRATEGIES = ("ddp", "fsdp", "zero1", "zero3")


@pytest.fixture(scope="module")
def losses(request, objectives, tmp_path_factory):
    """Return the losses by objective and strategy: on one rank ("single") and on two."""
    folder = tmp_path_factory.mktemp("ranks")
    wanted = sorted(selected.selected(request, "strategy"))
    sections = {name: {"training": {**RECIPE, **objectives[name]}} for name in objectives}
    found = {(name, "single"): train_alone(folder / name, **sections[name]) for name in sections}
    cases = [
        Case(f"{name}-{strategy}", strategy, name, sections=sections[name])
        for name in sections
        for strategy in wanted
    ]
    on_ranks = on_two_ranks(folder, cases, "")
    for case in cases:
        found[case.single, case.strategy] = on_ranks[case.name]
    return found


@selected.each("strategy", STRATEGIES, few=["fsdp"])
def test_two_ranks_match_one_and_resume_exactly(losses, objectives, strategy):
    for name in objectives:
        single, own = losses[name, "single"], losses[name, strategy]
        for step, loss in own["whole"].items():
            assert loss == pytest.approx(single[int(step)], rel=1e-4), (name, step)
        for step, loss in own["resumed"].items():
            assert loss == own["whole"][step], (name, step)
        for step, loss in own["from_single"].items():
            assert loss == pytest.approx(single[int(step)], rel=1e-4), (name, step)

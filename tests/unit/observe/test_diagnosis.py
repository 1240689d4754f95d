"""Rules find the problems of real runs that have them, and none in a run that has none."""

from __future__ import annotations

import contextlib
import re
import time
from dataclasses import replace

import numpy as np
import psutil
import pytest
import torch

from steadytrain.components.observe.diagnosis import RULES, findings
from steadytrain.components.observe.diagnosis.findings import DiagnosisSink
from steadytrain.components.observe.diagnosis.learning import clipped_gradients
from steadytrain.components.observe.diagnosis.rule import ObservedRun
from steadytrain.components.preprocess import step as preprocess
from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.config import from_mapping, load
from steadytrain.components.shared.config.fields import leaves
from steadytrain.components.shared.config.run import RunConfig
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import (
    Adjusted,
    AttemptStarted,
    DecisionMade,
    ProblemFound,
    SupervisorStarted,
    TrainingStarted,
    TrainingStep,
)
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.tasks.base import LossSum
from steadytrain.components.tasks.causal_lm import SupervisedFineTuning
from steadytrain.components.train.failures import Diverged
from steadytrain.components.train.loop.progress import Emitter
from steadytrain.components.train.loop.training import Training

from support.training import (
    LLAMA,
    VOCABULARY,
    Bench,
    events_of,
    language_rows,
    write_data,
    write_parts,
)

RECIPE = {
    "global_batch_size": 4,
    "max_steps": 120,
    "learning_rate": 5e-3,
    "logging_steps": 2,
    "eval_steps": 20,
    "save_steps": 120,
}


def noise(count, seed):
    """Return rows that nobody can predict, only learn by heart."""
    generator = np.random.default_rng(seed)
    return [
        {
            "input_ids": generator.integers(2, VOCABULARY, 32).tolist(),
            "targets": [0] + [1] * 31,
            "lengths": [32],
        }
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function that trains in this process, and returns the events of the run."""
    torch.set_num_threads(1)

    def train(name, rows, held_out, *, recovery=None, **training):
        root = tmp_path_factory.mktemp(name)
        data = write_data(root / "data", rows, held_out)
        bench = Bench.make(root, data, training={**RECIPE, **training}, recovery=recovery or {})
        settings = SupervisorStarted(
            generation=1, pid=1, host="h", settings=bench.config.model_dump(mode="json")
        )
        with contextlib.closing(bench.workspace.stream("supervisor")) as stream:
            stream.emit(settings)
        with contextlib.suppress(Diverged):
            bench.train_here()
        return bench

    return train


def problems(bench):
    return {item.rule for item in findings(read_events(bench.workspace.events))}


@pytest.fixture(scope="module")
def healthy(trained):
    return trained("healthy", language_rows(300), language_rows(20, seed=1))


@pytest.mark.slow
def test_run_without_problems_has_no_findings(healthy):
    assert problems(healthy) == set()


def of_learning(bench):
    """Return the problems without slow data and slow checkpoints, which a busy machine has too."""
    return problems(bench) - {"data_bound", "checkpoint_bound"}


@pytest.mark.slow
def test_run_that_learns_its_data_by_heart_overfits(trained):
    assert of_learning(trained("overfit", noise(8, 0), noise(8, 1))) == {"overfitting"}


@pytest.mark.slow
def test_run_that_learns_nothing_underfits_on_a_plateau(trained):
    bench = trained(
        "noise", noise(600, 0), noise(4, 1), lr_scheduler_type="constant", learning_rate=1e-4
    )
    assert of_learning(bench) == {"underfitting", "plateau"}


@pytest.mark.slow
def test_run_that_ends_while_its_loss_falls_underfits(trained):
    bench = trained(
        "short",
        language_rows(300),
        language_rows(4, seed=1),
        max_steps=50,
        logging_steps=1,
        lr_scheduler_type="constant",
        save_steps=50,
    )
    assert of_learning(bench) == {"underfitting"}


def test_run_that_diverges_has_too_high_a_learning_rate(trained):
    rows, rate = language_rows(60), {"learning_rate": 1e20, "warmup_steps": 0}
    assert "learning_rate_too_high" in problems(trained("fast", rows, [], **rate))


@pytest.mark.slow
def test_run_whose_loss_rises_has_too_high_a_learning_rate(trained):
    rate = {"learning_rate": 3.0, "warmup_steps": 0, "max_steps": 40, "logging_steps": 1}
    bench = trained("rising", language_rows(60), [], recovery={"spike_threshold": 0}, **rate)
    assert "learning_rate_too_high" in problems(bench)


def test_run_whose_loss_is_scaled_up_has_exploding_gradients(trained, monkeypatch):
    prompt = SupervisedFineTuning.compute_loss
    monkeypatch.setattr(
        SupervisedFineTuning, "compute_loss", lambda *given: LossSum(prompt(*given).total * 1000)
    )
    short = {"max_steps": 16, "logging_steps": 1}
    assert "exploding_gradients" in problems(trained("scaled", language_rows(40), [], **short))


@pytest.mark.parametrize(("scale", "found"), [(100, False), (1e6, True)])
def test_run_whose_loss_weights_change_too_fast_loses_a_part(tmp_path, scale, found):
    training = {
        "multi_task": {"loss_weighting": "uncertainty"},
        "param_groups": [{"match": "log_variances", "lr_scale": scale}],
        "max_steps": 8,
        "eval_steps": 2,
        "learning_rate": 1e-3,
        "warmup_steps": 0,
    }
    bench = Bench.make(tmp_path, write_parts(tmp_path / "data"), training={**RECIPE, **training})
    with contextlib.suppress(Diverged):
        bench.train_here()
    assert ("loss_weight_collapsed" in problems(bench)) == found


@pytest.mark.slow
def test_run_with_a_slow_input_is_bound_by_its_data(trained, monkeypatch):
    prompt = SupervisedFineTuning.collate

    def late(*given):
        # Long compared with a step on a machine that is busy, too.
        time.sleep(1)
        return prompt(*given)

    monkeypatch.setattr(SupervisedFineTuning, "collate", late)
    short = {"max_steps": 8, "logging_steps": 1}
    assert "data_bound" in problems(trained("data", language_rows(40), [], **short))


@pytest.mark.slow
def test_run_that_saves_slowly_after_each_step_is_bound_by_its_checkpoints(trained, monkeypatch):
    prompt = Training._state

    def late(*given):
        time.sleep(1)
        return prompt(*given)

    monkeypatch.setattr(Training, "_state", late)
    short = {"max_steps": 8, "logging_steps": 1, "save_steps": 1}
    assert "checkpoint_bound" in problems(trained("saves", language_rows(40), [], **short))


@pytest.mark.slow
def test_run_whose_task_keeps_every_batch_leaks_memory(trained, monkeypatch):
    prompt, kept = SupervisedFineTuning.compute_loss, []

    def keeps(*given):
        kept.append(bytearray(b"x" * 8_000_000))
        return prompt(*given)

    # Otherwise, memory is measured once per second.
    monkeypatch.setattr(Emitter, "resident", lambda _: psutil.Process().memory_info().rss)
    short = {"max_steps": 60, "logging_steps": 1}
    assert "memory_leak" not in problems(trained("tight", language_rows(40), [], **short))
    monkeypatch.setattr(SupervisedFineTuning, "compute_loss", keeps)
    assert "memory_leak" in problems(trained("leaks", language_rows(40), [], **short))


def test_duplicates_of_a_source_are_found_and_unique_records_are_not(tmp_path):
    words = [f"record number {index} about {index * 7919 % 1000}" for index in range(60)]
    for name, texts in (("unique", words), ("repeated", words + words[:30])):
        source = tmp_path / f"{name}.jsonl"
        source.write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
        config = from_mapping(
            {
                "name": "data",
                "run": name,
                "output": str(tmp_path / "output"),
                "data": {
                    "source": [str(source)],
                    "near_duplicate_threshold": None,
                    "validation_share": 0.2,
                    "test_share": 0.2,
                    "sequence_length": 32,
                },
                "model": {"vocab_size": 300, "config": LLAMA},
            }
        )
        preprocess.run(config)
        found = findings(read_events(Workspace.of(config).events))
        assert [item.rule for item in found] == ["duplicate_data"] * (name == "repeated")


# What this machine cannot show is put into the reports of the real run.
CHANGED = {
    "communication_bound": {"slowest_rank": 0, "slowest_rank_wait": 0.4, "communication_wait": 0.5},
    "stragglers": {"slowest_rank": 3, "slowest_rank_wait": 0.01, "communication_wait": 0.3},
    "padding_waste": {"padding": 0.6},
    "gpu_idle": {"gpu_utilization": 0.3},
}
FINE = {
    "communication_bound": {"slowest_rank": 0, "slowest_rank_wait": 0.1, "communication_wait": 0.1},
    "stragglers": {"slowest_rank": 3, "slowest_rank_wait": 0.2, "communication_wait": 0.25},
    "padding_waste": {"padding": 0.1},
    "gpu_idle": {"gpu_utilization": 0.9},
}


@pytest.mark.parametrize("rule", CHANGED)
def test_rule_about_what_this_machine_lacks_follows_its_reports(healthy, rule):
    events = read_events(healthy.workspace.events)

    def with_reports(fields):
        return [
            replace(event, time=event.time + 10 * event.step, **fields)
            if isinstance(event, TrainingStep)
            else event
            for event in events
        ]

    assert [item.rule for item in findings(with_reports(CHANGED[rule]))] == [rule]
    assert findings(with_reports(FINE[rule])) == []


@pytest.mark.parametrize(("clipped", "found"), [(5, False), (6, True)])
def test_clipping_of_more_than_half_of_the_steps_is_a_problem(clipped, found):
    """Of each ten steps, some are clipped. None is far above the limit."""
    settings = {"training": {"max_grad_norm": 1.0}}
    events = [
        SupervisorStarted(generation=1, pid=1, host="h", settings=settings),
        *(
            TrainingStep(
                attempt=1,
                step=10 * number,
                epoch=number,
                loss=1.0,
                learning_rate=1e-3,
                grad_norm=1.0 + number / 10,
                tokens=number,
                tokens_per_second=1.0,
                gpu_memory_used=0,
                memory_used=1,
                clipped_steps=clipped * number,
            )
            for number in range(1, 22)
        ),
    ]
    assert ["clipped_gradients"] * found == [
        item.rule for item in findings(events) if "gradients" in item.rule
    ]
    evidence = clipped_gradients(ObservedRun.of(events))
    # 20 reports count: their norms are evenly spaced from 1.2 to 3.1.
    assert ("clipped 114 of the last 190 steps" in evidence) == found
    assert ("are below 2.99" in evidence) == found


def test_straggler_that_changes_is_none(healthy):
    events = [
        replace(
            event, slowest_rank=event.step // 2 % 4, slowest_rank_wait=0.0, communication_wait=0.3
        )
        if isinstance(event, TrainingStep)
        else event
        for event in read_events(healthy.workspace.events)
    ]
    assert findings(events) == []


def test_repeated_steps_count_once(healthy):
    events = read_events(healthy.workspace.events)
    run = ObservedRun.of(events)
    again = AttemptStarted(
        attempt=2,
        world_size=1,
        batch=BatchSettings(2),
        gradient_accumulation_steps=1,
        resumed_from_step=60,
    )
    run.add(again)
    assert run.steps[-1].step == 60
    assert run.validations[-1].step == 60


@pytest.mark.slow
def test_problem_is_reported_once_even_after_a_restart(trained):
    bench = trained("again", noise(8, 0), noise(8, 1))
    for _ in range(2):
        sink = DiagnosisSink(bench.config, bench.workspace, every=0.05)
        sink.close_seconds = 300.0
        time.sleep(0.3)
        sink.close()
    (event,) = events_of(bench.workspace, ProblemFound)
    assert (event.rule, event.attempt) == ("overfitting", 1)
    assert event.remedy == RULES["overfitting"].remedy


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_rule_names_fields_that_exist_and_its_source(rule):
    fields = {field.name for field in leaves(RunConfig)}
    sections = {name.partition(".")[0] for name in fields}
    for word in re.findall(r"[a-z]+\.[a-z0-9_]+", rule.meaning + rule.remedy):
        assert word in fields or word.partition(".")[0] not in sections, word
    assert rule.source
    assert rule.meaning.endswith(".")
    assert rule.remedy.endswith(".")
    assert rule.check(ObservedRun()) == ""


MACHINE = {"parameters": 1, "device": "cpu", "precision": "fp32"}


def lively(config, *events):
    """Return a run under way with a recipe of 4e-3, scaled by 2, and other events."""
    recipe = [{"field": "training.learning_rate", "value": 4e-3, "reason": "given"}]
    scaled = {"lr_scaling": "linear", "global_batch_size": 8, "base_global_batch_size": 4}
    settings = {"training": {**config.training.model_dump(mode="json"), **scaled}}
    begun = SupervisorStarted(generation=1, pid=1, host="h", settings=settings)
    ready = TrainingStarted(attempt=1, step=0, max_steps=100, recipe=recipe, **MACHINE)
    return ObservedRun.of([begun, ready, *events], "support-bot")


def test_settings_that_cannot_be_read_leave_the_rate_unknown():
    """Damage, or another version, changes names of fields in the ledger."""
    settings = {"training": {"learning_rat$": 2e-3}}
    begun = SupervisorStarted(generation=1, pid=1, host="h", settings=settings)
    recipe = [{"field": "training.learning_rate", "value": 4e-3, "reason": "given"}]
    ready = TrainingStarted(attempt=1, step=0, max_steps=100, recipe=recipe, **MACHINE)
    assert ObservedRun.of([begun, ready], "support-bot").rate is None


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("exploding_gradients", "4e-4"),
        ("learning_rate_too_high", "4e-4"),
        ("learning_rate_too_low", "0.02"),
    ],
)
def test_advice_on_the_rate_is_a_command_with_the_run_and_the_value(name, rate):
    """The configuration's rate is 2e-3, which linear scaling doubles."""
    command = f"`steadytrain adjust support-bot --set training.learning_rate={rate}`"
    run = lively(load("causal-lm"))
    assert command in RULES[name].advice(run)
    assert "RUN" not in RULES[name].advice(run)


def test_advice_follows_what_changed_the_rate_and_the_end_of_the_run():
    config, rule = load("causal-lm"), RULES["learning_rate_too_high"]
    lowered = DecisionMade(
        attempt=1,
        failure_class="divergence",
        action="retry_changed",
        reason="slower",
        learning_rate_scale=0.1,
    )
    assert "learning_rate=4e-5`" in rule.advice(lively(config, lowered))
    change = Adjusted(
        attempt=2,
        step=3,
        field="training.learning_rate",
        value=1e-3,
        before=4e-3,
        after=2e-3,
        request="r",
    )
    assert "learning_rate=2e-4`" in rule.advice(lively(config, lowered, change))
    measured = {"tokens": 1, "tokens_per_second": 1.0, "gpu_memory_used": 0, "memory_used": 1}
    reached = {"attempt": 1, "step": 100, "epoch": 1.0, "loss": 1.0}
    last = TrainingStep(**reached, **measured, grad_norm=1.0, learning_rate=1e-3)
    clip = replace(change, field="training.max_grad_norm", value=7.0)
    for events, limit in ((clip,), 1.0), ((clip, last), 7.0):
        run = lively(config, *events)
        assert (run.rate, run.setting("training", "max_grad_norm")) == (2e-3, limit)
    ended = rule.advice(lively(config, last))
    assert ended.endswith("Here: training.learning_rate=4e-4 in the next run.")
    assert rule.advice(ObservedRun("early")) == rule.remedy

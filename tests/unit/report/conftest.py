"""Runs to report on: finished, failed, long, empty, and hostile."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from steadytrain.components.shared.config import RunConfig, from_mapping
from steadytrain.components.shared.events.types import Validated
from steadytrain.components.shared.records import (
    CalibrationBin,
    Interval,
    LandscapeRecord,
    LandscapeRing,
    TaskScore,
)

from support.written_run import Writer, data_card

CLASSES = ("asyncio", "ctypes", "distutils", "email", "encodings", "idlelib", "test", "tkinter")
LM_CARD = data_card("package:stdlib", {}, exact_duplicate=150, near_duplicate=44, bad_encoding=19)
CLASSES_CARD = data_card(
    "package:stdlib",
    {label: 90 + 170 * index for index, label in enumerate(CLASSES)},
    leakage=12,
    unknown_label=3,
)
LANDSCAPE = LandscapeRecord(
    records=64,
    radius=1.0,
    seed=0,
    steps=[-1.0, 0.0, 1.0],
    losses=[[8.25, 5.125, None], [4.5, 2.25, 4.75], [7.5, 5.5, 9.375]],
    profile=[
        LandscapeRing(distance=0.0, lowest=2.25, mean=2.25, highest=2.25, not_finite=0),
        LandscapeRing(distance=1.0, lowest=4.5, mean=6.4286, highest=9.375, not_finite=1),
    ],
)
HOSTILE = "</pre></script><script>alert('x')</script><img src=x onerror=\"y()\">&amp;{{ 7*7 }}"


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., RunConfig]:
    def make(name: str = "stdlib-lm", task: str = "causal_lm", **sections: Any) -> RunConfig:
        content = {
            "name": name,
            "run": f"{name}-1",
            "output": str(tmp_path / "output"),
            "data": {"source": ["package:stdlib"], "task": task},
            "model": {"config": {"model_type": "llama", "hidden_size": 256}},
        }
        return from_mapping(content | sections)

    return make


@pytest.fixture
def language_model(make_config: Callable[..., RunConfig]) -> Writer:
    """A finished run that became champion after two failed attempts."""
    run = Writer(make_config())
    run.preprocess(card=LM_CARD)
    run.start_step("train")
    run.attempt(
        1,
        last=170,
        max_steps=400,
        outcome="failed",
        failure_class="host_oom",
        message="rank 1 was killed by the kernel's out-of-memory killer",
        remedy="give the machine more memory",
    )
    run.attempt(2, first=100, last=260, max_steps=400, outcome="preempted")
    run.attempt(3, first=200, last=400, max_steps=400)
    run.warn("the tracking store http://127.0.0.1:5000 cannot be used: connection refused")
    run.warn("the tracking store http://127.0.0.1:5000 cannot be used: connection refused")
    run.trained(steps=400, attempts=3)
    run.evaluated(
        examples=501,
        metrics={
            "loss": Interval(value=2.2412, low=2.2101, high=2.2714),
            "perplexity": Interval(value=9.405, low=9.117, high=9.693),
            "bits_per_byte": Interval(value=0.8127, low=0.8014, high=0.8239),
        },
        baselines={"loss": 5.912, "unigram_bits_per_byte": 2.144, "uniform": 9.011},
        tasks={
            "cloze/acc": TaskScore(value=0.4375, stderr=0.0312, greater_is_better=True, examples=96)
        },
        landscape=LANDSCAPE,
        slices={
            "asyncio": {"loss": 2.31, "examples": 44},
            "email": {"loss": 2.18, "examples": 61},
        },
    )
    reason = (
        "promoted: bits_per_byte 0.8127 against 0.8541 of version 2, 4.8 % better "
        "(95% interval 4.1 to 5.6 %, margin 0 %)"
    )
    run.decided(
        True,
        reason,
        metric="bits_per_byte",
        greater_is_better=False,
        candidate=0.8127,
        champion=0.8541,
        champion_version="2",
        improvement=Interval(value=0.0485, low=0.0411, high=0.0561),
        floors={"perplexity": 40.0},
        slices={"asyncio": 0.031, "email": -0.004},
    )
    run.registered("3", champion=True, reason=reason)
    return run


@pytest.fixture
def classifier(make_config: Callable[..., RunConfig]) -> Writer:
    """A finished classifier run that was not promoted."""
    run = Writer(make_config("packages", "sequence_classification"))
    run.preprocess(labels=CLASSES, card=CLASSES_CARD)
    run.start_step("train")
    run.attempt(1, last=300, max_steps=300, every=5, save_every=50, task_metrics=True)
    run.trained(steps=300, metric="accuracy")
    numbers = random.Random(1)
    confusion = [
        [
            numbers.randint(40, 90) if row == column else numbers.choice([0, 0, 0, 1, 2, 6])
            for column in range(len(CLASSES))
        ]
        for row in range(len(CLASSES))
    ]
    run.evaluated(
        examples=sum(map(sum, confusion)),
        metrics={
            "accuracy": Interval(value=0.9134, low=0.8931, high=0.9312),
            "macro_f1": Interval(value=0.9017, low=0.8790, high=0.9221),
            "auroc": Interval(value=0.9871, low=0.9822, high=0.9910),
            "ece": Interval(value=0.0312, low=0.0257, high=0.0391),
        },
        baselines={"accuracy": 0.1622, "macro_f1": 0.0349},
        labels=list(CLASSES),
        confusion=confusion,
        per_class={
            label: {
                "precision": numbers.uniform(0.8, 1),
                "recall": numbers.uniform(0.8, 1),
                "f1": numbers.uniform(0.8, 1),
                "support": sum(confusion[index]),
                "average_precision": numbers.uniform(0.8, 1),
            }
            for index, label in enumerate(CLASSES)
        },
        calibration=[
            CalibrationBin(examples=40, confidence=0.55, accuracy=0.5),
            CalibrationBin(examples=400, confidence=0.95, accuracy=0.97),
        ],
        curves={CLASSES[0]: [(1.0, 0.4), (0.8, 0.9), (0.0, 1.0)]},
    )
    reason = (
        "not promoted: accuracy 0.9134 against 0.9207 of version 4, 0.8 % worse (95% interval "
        "-2.1 to 0.6 %, margin 0 %), but the interval does not lie above the margin"
    )
    run.decided(
        False,
        reason,
        metric="accuracy",
        greater_is_better=True,
        candidate=0.9134,
        champion=0.9207,
        champion_version="4",
        improvement=Interval(value=-0.0079, low=-0.0211, high=0.0061),
    )
    run.registered("5", champion=False, reason=reason)
    return run


@pytest.fixture
def failed(make_config: Callable[..., RunConfig]) -> Writer:
    """A run whose training diverged."""
    run = Writer(make_config())
    run.preprocess(card=LM_CARD)
    run.start_step("train")
    run.attempt(
        1,
        last=180,
        max_steps=400,
        outcome="failed",
        nan_at=(160, 170, 180),
        failure_class="divergence",
        message="the loss is not finite at step 160",
    )
    run.fail(
        "train",
        "TrainingFailed",
        "the loss is not finite at step 160; attempts: 1 (divergence)",
        "lower training.learning_rate (now 0.0003) or raise training.warmup_steps",
    )
    return run


@pytest.fixture
def long_run(make_config: Callable[..., RunConfig]) -> Writer:
    """A run of 200,000 steps, logged every ten steps."""
    run = Writer(make_config())
    run.preprocess(card=LM_CARD)
    run.start_step("train")
    run.attempt(1, last=200_000, max_steps=200_000, save_every=5_000, nan_at=(120_000,))
    run.trained(steps=200_000)
    return run


@pytest.fixture
def hostile_text() -> str:
    return HOSTILE


@pytest.fixture
def bare(make_config: Callable[..., RunConfig]) -> Writer:
    """A run with a configuration and nothing else."""
    return Writer(make_config())


@pytest.fixture
def hostile(make_config: Callable[..., RunConfig]) -> Writer:
    """A run where every text from data, libraries, or people tries to break out of the page."""
    run = Writer(make_config(task=f"module:{HOSTILE}"))
    labels = (HOSTILE, "other")
    run.preprocess(labels=labels, card=data_card(HOSTILE, {HOSTILE: 3, "other": 4}))
    run.start_step("train")
    run.attempt(
        1, last=100, max_steps=100, outcome="failed", failure_class=HOSTILE, message=HOSTILE,
        remedy=HOSTILE,
    )  # fmt: skip
    run.warn(HOSTILE)
    run.emit("rank-0", Validated, attempt=1, step=101, epoch=1.0, metrics={HOSTILE: 0.5}, best=True)
    run.trained(steps=100, metric=HOSTILE)
    run.evaluated(
        examples=7,
        metrics={HOSTILE: Interval(value=0.5, low=0.4, high=0.6)},
        baselines={f"other {HOSTILE}": 0.1},
        labels=list(labels),
        confusion=[[3, 1], [2, 1]],
        per_class={HOSTILE: {HOSTILE: 0.5}},
        slices={HOSTILE: {HOSTILE: 0.5}},
    )
    run.decided(
        False, HOSTILE, metric=HOSTILE, greater_is_better=True, candidate=0.5,
        floors={HOSTILE: 0.1}, slices={HOSTILE: 0.1}, champion=0.4, champion_version=HOSTILE,
    )  # fmt: skip
    run.registered(HOSTILE, champion=False, reason=HOSTILE)
    run.start_step("promote")
    run.clock += 1
    run.fail("promote", HOSTILE, HOSTILE, HOSTILE)
    return run

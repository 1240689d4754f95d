"""Runs as they are left in a workspace, written with the real events and records."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from steadytrain.components.shared.config import RunConfig, from_mapping
from steadytrain.components.shared.environment import environment
from steadytrain.components.shared.events import Event
from steadytrain.components.shared.events.types import (
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    StepFailed,
    StepFinished,
    StepStarted,
    TrainingStarted,
    TrainingStep,
    Validated,
    Warned,
)
from steadytrain.components.shared.records import (
    DataRecord,
    EvaluationRecord,
    GateRecord,
    Interval,
    RegistrationRecord,
    SideRecord,
    TrainRecord,
)
from steadytrain.components.shared.workspace import Workspace

BEGAN = 1_700_000_000.0


@dataclass
class Writer:
    """Writes a run as its steps would, on a clock of its own."""

    config: RunConfig
    clock: float = BEGAN

    def __post_init__(self) -> None:
        self.workspace = Workspace.of(self.config)
        self.workspace.create()
        self.workspace.config.write_text(self.config.to_yaml())
        self.random = random.Random(0)

    def emit(self, writer: str, kind: type[Event], **fields: Any) -> None:
        stream = self.workspace.stream(writer)
        stream.emit(kind(time=self.clock, **fields))
        stream.close()

    def begin(self, step: str) -> None:
        self.clock += 0.2
        self.emit(step, StepStarted, stage=step, environment=environment())

    def again(self) -> None:
        """The pipeline is started (once more)."""
        self.begin("begin")
        self.finish("begin", 0.1)

    def finish(self, step: str, seconds: float, summary: str = "", reused: bool = False) -> None:
        self.clock += seconds
        self.emit(step, StepFinished, stage=step, summary=summary, reused=reused)

    def fail(self, step: str, error: str, message: str, remedy: str = "") -> None:
        self.emit(step, StepFailed, stage=step, error=error, message=message, remedy=remedy)

    def warn(self, message: str, stage: str = "train") -> None:
        self.emit(stage, Warned, stage=stage, message=message)

    def preprocess(
        self, *, labels: tuple[str, ...] = (), card: dict[str, Any] | None = None
    ) -> DataRecord:
        self.begin("preprocess")
        folder = self.workspace.data("5f3a9c1be2d44a70")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "card.json").write_text(json.dumps(card or {}))
        documents = {"test": 501, "train": 8_731, "validation": 472}
        record = DataRecord(
            folder=str(folder),
            fingerprint="5f3a9c1be2d44a70",
            task=self.config.data.task,
            sides={
                side: SideRecord(  # type: ignore[misc]
                    shards=["a.arrow"],
                    rows=count * 3,
                    documents=count,
                    tokens=count * 1210,
                    target_tokens=count * 1209,
                )
                for side, count in documents.items()
            },
            test_records="test.arrow",
            split_digest="d",
            labels=list(labels),
        )
        record.save(self.workspace.record("preprocess"))
        self.finish("preprocess", 31.4, "9,704 documents, 11.7 M tokens; 213 quarantined")
        return record

    def attempt(
        self,
        number: int,
        *,
        first: int = 0,
        last: int,
        max_steps: int,
        every: int = 10,
        outcome: str = "finished",
        nan_at: tuple[int, ...] = (),
        seconds_a_step: float = 0.25,
        task_metrics: bool = False,
        **ending: str,
    ) -> None:
        self.emit(
            "supervisor",
            AttemptStarted,
            attempt=number,
            world_size=2,
            micro_batch_size=8,
            gradient_accumulation_steps=2,
            resumed_from_step=first or None,
        )
        self.clock += 6.2
        self.emit(
            "rank-0",
            TrainingStarted,
            attempt=number,
            step=first,
            max_steps=max_steps,
            parameters=3_214_080,
            device="cpu",
            precision="fp32",
        )
        stream = self.workspace.stream("rank-0")
        for step in range(first + every, last + 1, every):
            self.clock += every * seconds_a_step
            done = step / max_steps
            loss = 2.1 + 7.0 * math.exp(-9 * done) + self.random.gauss(0, 0.04)
            stream.emit(
                TrainingStep(
                    time=self.clock,
                    attempt=number,
                    step=step,
                    epoch=done * 2,
                    loss=math.nan if step in nan_at else loss,
                    learning_rate=3e-4 * min(1.0, done / 0.05) * (1 + math.cos(math.pi * done)) / 2,
                    grad_norm=0.5 + 4 * math.exp(-6 * done) + abs(self.random.gauss(0, 0.15)),
                    tokens=step * 16_384,
                    tokens_per_second=64_000 + self.random.gauss(0, 1500),
                    gpu_memory_used=0,
                    memory_used=int(1.1e9 + 8e7 * (1 - math.exp(-20 * done))),
                )
            )
            if step % (10 * every) == 0:
                metrics = {"loss": loss + 0.08 + 0.1 * done, "perplexity": math.exp(loss + 0.08)}
                if task_metrics:
                    metrics |= {"accuracy": 0.93 - 0.6 * math.exp(-5 * done)}
                stream.emit(
                    Validated(
                        time=self.clock + 0.01,
                        attempt=number,
                        step=step,
                        epoch=done * 2,
                        metrics=metrics,
                        best=True,
                    )
                )
                stream.emit(
                    CheckpointSaved(
                        time=self.clock + 0.02,
                        attempt=number,
                        step=step,
                        checkpoint=f"step-{step}",
                        bytes=38_000_000,
                        seconds=0.4,
                    )
                )
        stream.close()
        self.clock += 1.5
        self.emit("supervisor", AttemptEnded, attempt=number, outcome=outcome, step=last, **ending)
        self.clock += 2.0

    def trained(self, *, steps: int, attempts: int = 1, metric: str = "loss") -> None:
        TrainRecord(
            outcome="finished",
            model=str(self.workspace.model),
            weights_digest="w",
            metric=metric,
            best_score=2.2134,
            best_step=steps - 20,
            steps=steps,
            attempts=attempts,
            parameters=3_214_080,
            seconds=self.clock - BEGAN - 31.4,
        ).save(self.workspace.record("train"))
        self.finish("train", 1.0, f"{steps} steps, best validation {metric} 2.213")

    def evaluated(self, **fields: Any) -> None:
        self.begin("evaluate")
        EvaluationRecord(task=self.config.data.task, scores="scores.parquet", **fields).save(
            self.workspace.record("evaluate")
        )

    def decided(self, promoted: bool, reason: str, **fields: Any) -> None:
        GateRecord(promoted=promoted, reason=reason, margin=0.0, **fields).save(
            self.workspace.record("gate")
        )
        self.finish("evaluate", 14.0, reason)

    def registered(self, version: str, *, champion: bool, reason: str) -> None:
        record = RegistrationRecord(
            model_name=self.config.model_name,
            version=version,
            model_uri=f"models:/{self.config.model_name}/{version}",
            champion=champion,
            reason=reason,
        )
        self.begin("register")
        record.save(self.workspace.record("register"))
        self.finish("register", 8.0, f"version {version} of {self.config.model_name}")
        if champion:
            self.begin("promote")
            record.save(self.workspace.record("promote"))
            self.finish("promote", 2.0, f"version {version} is the champion")


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
    """A finished run that became champion, after two attempts that failed."""
    run = Writer(make_config())
    run.preprocess(card=LM_CARD)
    run.begin("train")
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


CLASSES = ("asyncio", "ctypes", "distutils", "email", "encodings", "idlelib", "test", "tkinter")


@pytest.fixture
def classifier(make_config: Callable[..., RunConfig]) -> Writer:
    """A finished run of a classifier that was not promoted."""
    run = Writer(make_config("packages", "sequence_classification"))
    run.preprocess(labels=CLASSES, card=CLASSES_CARD)
    run.begin("train")
    run.attempt(1, last=300, max_steps=300, every=5, task_metrics=True)
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
            }
            for index, label in enumerate(CLASSES)
        },
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
    run.begin("train")
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
    """200,000 steps, logged every ten."""
    run = Writer(make_config())
    run.preprocess(card=LM_CARD)
    run.begin("train")
    run.attempt(1, last=200_000, max_steps=200_000, nan_at=(120_000,))
    run.trained(steps=200_000)
    return run


def _card(source: str, labels: dict[str, int], **quarantine: int) -> dict[str, Any]:
    """As the preprocess step writes card.json."""
    lengths = {5: 12, 6: 60, 7: 420, 8: 1630, 9: 2901, 10: 2512, 11: 1320, 12: 540, 13: 130, 14: 9}
    side = {
        "documents": 1,
        "bytes": 1,
        "fill": 0.9971,
        "lengths": [[2**n, 2 ** (n + 1) - 1, count] for n, count in lengths.items()],
        "truncated": 3,
        "skipped_windows": 0,
        "labels": labels,
        "samples": [{"text": "import this"}],
    }
    return {
        "source": [source],
        "records": 9_704 + sum(quarantine.values()),
        "defective": 1,
        "duplicates": {"exact_duplicate": quarantine.get("exact_duplicate", 0)},
        "quarantine": quarantine,
        "sides": {"train": side, "validation": side, "test": side},
    }


LM_CARD = _card("package:stdlib", {}, exact_duplicate=150, near_duplicate=44, bad_encoding=19)
CLASSES_CARD = _card(
    "package:stdlib",
    {label: 90 + 170 * index for index, label in enumerate(CLASSES)},
    leakage=12,
    unknown_label=3,
)

HOSTILE = "</pre></script><script>alert('x')</script><img src=x onerror=\"y()\">&amp;{{ 7*7 }}"


@pytest.fixture
def hostile_text() -> str:
    return HOSTILE


@pytest.fixture
def bare(make_config: Callable[..., RunConfig]) -> Writer:
    """A run that has a configuration and nothing else."""
    return Writer(make_config())


@pytest.fixture
def hostile(make_config: Callable[..., RunConfig]) -> Writer:
    """Every text that comes from data, libraries or people tries to break out of the page."""
    run = Writer(make_config(task=f"module:{HOSTILE}"))
    labels = (HOSTILE, "other")
    run.preprocess(labels=labels, card=_card(HOSTILE, {HOSTILE: 3, "other": 4}))
    run.begin("train")
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
    run.begin("promote")
    run.clock += 1
    run.fail("promote", HOSTILE, HOSTILE, HOSTILE)
    return run

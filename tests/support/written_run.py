"""A run's workspace as its steps would write it, with the real events and records."""

from __future__ import annotations

import contextlib
import json
import math
import random
from dataclasses import dataclass
from typing import Any

from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.config import RunConfig
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
    RegistrationRecord,
    SideRecord,
    TrainRecord,
)
from steadytrain.components.shared.registry import decided_about
from steadytrain.components.shared.stage import environment
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.recovery.history import is_of_rank
from steadytrain.components.train.recovery.ledger import Ledger

BEGAN = 1_700_000_000.0


@dataclass
class Writer:
    """Writes a run as its steps would, on its own clock."""

    config: RunConfig
    clock: float = BEGAN

    def __post_init__(self) -> None:
        self.workspace = Workspace.of(self.config)
        self.workspace.create()
        self.workspace.config.write_bytes(self.config.to_saved())
        self.ledger = Ledger(self.workspace)
        self.random = random.Random(0)

    def emit(self, writer: str, kind: type[Event], **fields: Any) -> None:
        self.record(writer, kind(time=self.clock, **fields))

    def record(self, writer: str, event: Event) -> None:
        with contextlib.closing(self.workspace.lines(writer)) as stream:
            if is_of_rank(event):
                stream.append(event)
                self.ledger.record(event)
            else:
                self.ledger.emit(event, stream)

    def start_step(self, step: str) -> None:
        self.clock += 0.2
        self.emit(step, StepStarted, stage=step, environment=environment())

    def again(self) -> None:
        """Record the start of the pipeline, for the first time or again."""
        self.start_step("begin")
        self.finish("begin", 0.1)

    def finish(
        self,
        step: str,
        seconds: float,
        summary: str = "",
        reused: bool = False,
        reused_from: str = "",
    ) -> None:
        self.clock += seconds
        fields = {"summary": summary, "reused": reused, "reused_from": reused_from}
        self.emit(step, StepFinished, stage=step, **fields)

    def fail(self, step: str, error: str, message: str, remedy: str = "") -> None:
        self.emit(step, StepFailed, stage=step, error=error, message=message, remedy=remedy)

    def warn(self, message: str, stage: str = "train") -> None:
        self.emit(stage, Warned, stage=stage, message=message)

    def validated(self, step: int, *, best: bool) -> None:
        self.emit(
            "rank-0",
            Validated,
            attempt=1,
            step=step,
            epoch=0.1,
            metrics={"loss": 1.0},
            best=best,
        )

    def preprocess(
        self, *, labels: tuple[str, ...] = (), card: dict[str, Any] | None = None
    ) -> DataRecord:
        self.start_step("preprocess")
        folder = self.workspace.prepared / "5f3a9c1be2d44a70"
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
        save_every: int = 100,
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
            batch=BatchSettings(8),
            gradient_accumulation_steps=2,
            resumed_from_step=first or None,
            decisions=[
                {"field": "training.save_steps", "value": None, "reason": "Young's interval"}
            ],
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
            environment={"python": "3.11.2"},
            recipe=[
                {"field": "training.learning_rate", "value": 1e-4, "reason": "the rule's reason"}
            ],
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
                    clipped_steps=(step - first) // 4,
                )
            )
            if step % save_every == 0:
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
                saved = CheckpointSaved(
                    time=self.clock + 0.42,
                    attempt=number,
                    step=step,
                    checkpoint=f"step-{step}",
                    bytes=38_000_000,
                    seconds=0.4,
                )
                stream.emit(saved)
                self.ledger.record(saved)
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
        self.start_step("evaluate")
        EvaluationRecord(
            task=self.config.data.task, weights_digest="w", scores="scores.parquet", **fields
        ).save(self.workspace.record("evaluate"))

    def decided(self, promoted: bool, reason: str, **fields: Any) -> None:
        GateRecord(
            subject=decided_about(self.config, "w"),
            promoted=promoted,
            reason=reason,
            margin=0.0,
            **fields,
        ).save(self.workspace.record("gate"))
        self.finish("evaluate", 14.0, reason)

    def registered(self, version: str, *, champion: bool, reason: str) -> None:
        record = RegistrationRecord(
            model_name=self.config.model_name,
            version=version,
            model_uri=f"models:/{self.config.model_name}/{version}",
            champion=champion,
            reason=reason,
        )
        self.start_step("register")
        record.save(self.workspace.record("register"))
        self.finish("register", 8.0, f"version {version} of {self.config.model_name}")
        if champion:
            self.start_step("promote")
            record.save(self.workspace.record("promote"))
            self.finish("promote", 2.0, f"version {version} is the champion")


def data_card(source: str, labels: dict[str, int], **quarantine: int) -> dict[str, Any]:
    """Return card.json as the preprocess step writes it."""
    lengths = {5: 12, 6: 60, 7: 420, 8: 1630, 9: 2901, 10: 2512, 11: 1320, 12: 540, 13: 130, 14: 9}
    side = {
        "documents": 1,
        "bytes": 1,
        "fill": 0.9971,
        "lengths": [[2**n, 2 ** (n + 1) - 1, count] for n, count in lengths.items()],
        "truncated": 3,
        "skipped_windows": 0,
        "labels": labels,
        "target_share": 0.5,
        "samples": [{"text": "import this"}],
    }
    return {
        "source": [source],
        "records": 9_704 + sum(quarantine.values()),
        "defective": 1,
        "duplicates": {"exact_duplicate": quarantine.get("exact_duplicate", 0)},
        "near_duplicate_threshold": 0.85,
        "quarantine": quarantine,
        "sides": {"train": side, "validation": side, "test": side},
    }

"""Our loop and Transformers' Trainer on the same rows, starting from the same weights.

`main` runs on each rank. For each setting below, it writes the losses of every step, ours and
Trainer's, to FOLDER/losses.json.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.state import AcceleratorState, GradientState
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.train.checkpoint.store import CheckpointStore
from steadytrain.components.train.loop.control import StopRequests
from steadytrain.components.train.loop.reporter import Reporter
from steadytrain.components.train.loop.setup import TrainingSetup, set_up
from steadytrain.components.train.loop.training import Training

from support.training import LLAMA, VOCABULARY, Bench, losses_of, packed_row, write_data

STEPS, GLOBAL_BATCH = 30, 8
SETTINGS = {
    "one micro-batch": (1, 0.0),
    "four micro-batches": (4, 0.0),
    "smoothed labels": (1, 0.1),
}
"""Micro-batches that a rank accumulates, and label smoothing.

Label smoothing runs only with one rank and one micro-batch, because Trainer weights every
micro-batch equally, regardless of its number of targets.
"""
RECIPE = {
    "max_steps": STEPS,
    "learning_rate": 5e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.1,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "adam_beta2": 0.98,
    "seed": 3,
}
PADDING = 1


def settings(ranks: int) -> list[str]:
    """Return the names of the settings that Trainer treats as we do with this many ranks."""
    return [name for name, (_, smoothing) in SETTINGS.items() if ranks == 1 or not smoothing]


class Losses(TrainerCallback):
    """Keeps the logged losses."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            self.found.append(logs["loss"])


def rows() -> list[dict[str, Any]]:
    """Return single documents of 2 to 48 tokens; some exclude their first tokens from the loss."""
    generator = np.random.default_rng(0)
    made = []
    for _ in range(100):
        row = packed_row([int(generator.integers(2, 49))], generator)
        length = len(row["input_ids"])
        masked = int(generator.integers(0, length))
        row["targets"] = [int(index > masked) for index in range(length)]
        made.append(row)
    return made


def padded(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Collate as Trainer's collators do: padded on the right, labels not shifted."""
    longest = max(len(row["input_ids"]) for row in features)
    batch: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
    for row in features:
        ids, wanted = list(map(int, row["input_ids"])), row["targets"]
        empty = longest - len(ids)
        labels = [token if target else -100 for token, target in zip(ids, wanted, strict=True)]
        batch["input_ids"].append(ids + [PADDING] * empty)
        batch["attention_mask"].append([1] * len(ids) + [0] * empty)
        batch["labels"].append(labels + [-100] * empty)
    return {name: torch.tensor(values) for name, values in batch.items()}


def by_trainer(
    folder: Path, parts: TrainingSetup, initial: Mapping[str, torch.Tensor]
) -> list[float]:
    """Return Trainer's losses, with its batches in the order that our ranks use."""
    smoothing = parts.config.training.label_smoothing_factor
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**LLAMA, vocab_size=VOCABULARY), dtype=torch.float32
    )
    model.load_state_dict(initial)
    kept = Losses()
    Trainer(
        model=model,
        train_dataset=[parts.train[index] for index in trainer_order(parts)],
        data_collator=padded,
        callbacks=[kept],
        args=TrainingArguments(
            str(folder / "trainer"),
            **RECIPE,
            optim="adamw_torch",
            label_smoothing_factor=smoothing,
            per_device_train_batch_size=parts.batch.micro_batch_size,
            gradient_accumulation_steps=GLOBAL_BATCH
            // parts.batch.micro_batch_size
            // parts.world_size,
            train_sampling_strategy="sequential",
            remove_unused_columns=False,
            use_cpu=True,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
    ).train()
    return kept.found


def trainer_order(parts: TrainingSetup) -> Iterator[int]:
    """Yield row indices in the order that makes Trainer's batches match ours.

    Trainer deals complete micro-batches to the ranks in turn; our ranks have contiguous shares.
    """
    micro, own = parts.batch.micro_batch_size, GLOBAL_BATCH // parts.world_size
    for step in range(STEPS):
        batch = parts.order.take(step * GLOBAL_BATCH, GLOBAL_BATCH)
        for part in range(0, own, micro):
            for start in range(part, GLOBAL_BATCH, own):
                yield from batch[start : start + micro]


def ours(bench: Bench, parts: TrainingSetup) -> list[float]:
    stream = bench.workspace.stream("train") if parts.rank == 0 else None
    store = CheckpointStore(bench.workspace.checkpoints, keep=1)
    Training(parts, store, Reporter(stream, 1), StopRequests(None)).run()
    return list(losses_of(bench.workspace).values()) if parts.rank == 0 else []


def main(folder: Path) -> None:
    rank, world_size = (int(os.environ.get(*pair)) for pair in (("RANK", "0"), ("WORLD_SIZE", "1")))
    data = write_data(folder / f"data-{rank}", rows(), rows()[:3])
    found = {}
    for name in settings(world_size):
        accumulation, smoothing = SETTINGS[name]
        bench = Bench.make(
            folder / f"ours-{name}",
            data,
            training={
                **RECIPE,
                "label_smoothing_factor": smoothing,
                "global_batch_size": GLOBAL_BATCH,
                "logging_steps": 1,
                "eval_steps": STEPS,
                "save_steps": STEPS,
            },
            compute={"nproc_per_node": world_size},
        )
        for state in (AcceleratorState, GradientState):
            state._reset_state()
        batch = BatchSettings(GLOBAL_BATCH // accumulation // world_size)
        parts = set_up(bench.config, data, batch)
        initial = {name: item.clone() for name, item in parts.module.state_dict().items()}
        found[name] = [ours(bench, parts), by_trainer(folder, parts, initial)]
    if rank == 0:
        (folder / "losses.json").write_text(json.dumps(found))

"""A small classifier on the same texts, trained by our loop or by Trainer in order of length."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.throughput import RECIPE, Texts, train_ours, trainer_arguments
from support.timed import Found, in_processes, measured
from support.training import CLASSES, Bench, write_data

BATCH, HELD_OUT = 16, 64
LABELS = ("even", "odd")


def run_classes(kind: str, folder: Path, model: Mapping[str, Any], texts: Texts) -> Found:
    """Run one epoch with "ours" or in one of Trainer's orders; the second token sets the label."""
    rows = [{"input_ids": text, "label": int(text[1] % 2)} for text in texts]
    train = _ours if kind == "ours" else _trainer
    given = (kind, dict(model), rows[HELD_OUT:], rows[:HELD_OUT])
    return in_processes(folder, train, *given)


def _ours(folder: Path, _: str, model: dict[str, Any], rows: Any, held_out: Any) -> Found:
    data = write_data(
        folder / "data",
        rows,
        [],
        task="sequence_classification",
        schema=CLASSES,
        labels=LABELS,
        sequence_length=model["max_position_embeddings"],
    )
    steps = len(rows) // BATCH
    bench = Bench.make(
        folder / "run",
        data,
        model={"config": model},
        training={
            **RECIPE,
            "global_batch_size": BATCH,
            "max_steps": steps,
            "logging_steps": steps,
            "bf16": True,
        },
        compute={"device": "cpu"},
    )
    return train_ours(bench, BATCH, lambda module: _loss(module, held_out))


def _trainer(folder: Path, order: str, model: dict[str, Any], rows: Any, held_out: Any) -> Found:
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForSequenceClassification,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    set_seed(int(RECIPE["seed"]))
    module = AutoModelForSequenceClassification.from_config(
        AutoConfig.for_model(**model, num_labels=len(LABELS)), dtype=torch.float32
    )
    trainer = Trainer(
        model=module,
        train_dataset=rows,
        data_collator=_padded,
        args=TrainingArguments(
            **trainer_arguments(folder, True, len(rows) // BATCH),
            per_device_train_batch_size=BATCH,
            train_sampling_strategy=order,
        ),
    )
    tokens = sum(len(row["input_ids"]) for row in rows)
    return measured(trainer.train, tokens, lambda: _loss(module, held_out))


def _padded(rows: list[dict[str, Any]]) -> dict[str, Any]:
    import torch
    from torch.nn.utils.rnn import pad_sequence

    ids = [torch.tensor(row["input_ids"]) for row in rows]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(item) for item in ids], batch_first=True),
        "labels": torch.tensor([row["label"] for row in rows]),
    }


def _loss(module: Any, held_out: list[dict[str, Any]]) -> float:
    import torch

    module.eval()
    with torch.no_grad():
        return float(module(**_padded(held_out)).loss)

"""Runs whose rows a reference model scores."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import torch
from accelerate.state import AcceleratorState, GradientState
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from steadytrain.components.shared.config.data_sections import MULTI_TASK
from steadytrain.components.train.loop.control import Watch
from steadytrain.components.train.loop.data import Rows
from steadytrain.components.train.loop.row_losses import Losses, row_losses
from steadytrain.components.train.loop.setup import make_accelerator

from support.training import (
    CLASSES,
    PACKED,
    VOCABULARY,
    Bench,
    class_rows,
    language_rows,
    write_data,
)
from support.weight_digests import BERT

LABELS: Final = ["a", "b", "c"]
PARTS: Final = ["one/a", "one/b", "two/c"]
IDS: Final = pa.schema([("input_ids", pa.list_(pa.int32()))])


def save(folder: Path, auto: Any, fields: Mapping[str, Any], **more: Any) -> str:
    """Write a model with random weights. Return its address."""
    torch.manual_seed(5)
    wanted = AutoConfig.for_model(**{**fields, "vocab_size": VOCABULARY, **more})
    auto.from_config(wanted).save_pretrained(folder)
    return str(folder)


def bench_of(
    folder: Path,
    task: str,
    rows: Sequence[Mapping[str, Any]],
    model: str,
    schema: pa.Schema = PACKED,
    labels: Sequence[str] = (),
    fields: Mapping[str, Any] = BERT,
    **training: Any,
) -> Bench:
    """Return a run with a curriculum by the loss of a model.

    Args:
        model: its address.
        fields: of the model that trains.
    """
    data = write_data(folder / "data", rows, rows[:4], task=task, labels=labels, schema=schema)
    curriculum = {"by": "loss", "model": model}
    recipe = {"global_batch_size": 4, "max_steps": 6, "curriculum": curriculum, **training}
    if task == MULTI_TASK:
        recipe["multi_task"] = {}
    return Bench.make(folder, data, model={"config": fields}, training=recipe)


def fresh() -> None:
    """Forget the accelerator of an earlier run in this process."""
    for state in (AcceleratorState, GradientState):
        state._reset_state()


def scored(bench: Bench, watch: Watch | None = None) -> Losses:
    """Return each row's loss, from the model or from the file."""
    fresh()
    rows = Rows([bench.data.path(name) for name in bench.data.sides["train"].shards])
    watch = watch or Watch()
    return row_losses(bench.config, bench.data, rows, make_accelerator(bench.config), watch)


def language(folder: Path, fields: Mapping[str, Any]) -> Bench:
    """Return a language model's run."""
    model = save(folder / "model", AutoModelForCausalLM, fields)
    return bench_of(folder, "causal_lm", language_rows(70), model, fields=fields)


def classes(folder: Path, fields: Mapping[str, Any] = BERT, **more: Any) -> Bench:
    """Return a classifier's run."""
    ids = {"id2label": dict(enumerate(LABELS)), **more}
    model = save(folder / "model", AutoModelForSequenceClassification, fields, **ids)
    rows = class_rows(70)
    return bench_of(folder, "sequence_classification", rows, model, CLASSES, LABELS, fields)


def score_on_rank(folder: Path) -> None:
    """Score the rows of a classifier on this rank; write what it gets to FOLDER/RANK.npy."""
    rank = os.environ["RANK"]
    bench = classes(folder / rank)
    # Ranks share the output.
    bench.config = bench.config.model_copy(update={"output": str(folder / "shared")})
    np.save(folder / f"{rank}.npy", scored(bench))

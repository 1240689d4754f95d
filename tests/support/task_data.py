"""Tiny prepared data, models and reference models for each built-in task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

from steadytrain.components.shared.config.data_sections import MULTI_LABEL, MULTI_TASK
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tasks.encoding.preference import UnpairedPreferenceEncoder
from steadytrain.components.tasks.encoding.tokens import load_tokenizer

from support.training import (
    LLAMA,
    PART_LABELS,
    TEXTS,
    VOCABULARY,
    class_rows,
    language_rows,
    packed_row,
    with_texts,
    write_data,
    write_parts,
)
from support.weight_digests import BERT

# Without dropout, which differs between ranks.
STILL: Final = {**BERT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LABELS: Final = ("a", "b", "c")
NUMBER: Final = "sequence_regression"
_CLASSES: Final = {
    "sequence_classification": LABELS,
    MULTI_LABEL: LABELS,
    MULTI_TASK: PART_LABELS,
    NUMBER: ("label",),
}
_SENTINELS: Final = tuple(f"<extra_id_{number}>" for number in range(20))
_TRAINED, _HELD_OUT = 60, 8
_IDS: Final = pa.schema({"input_ids": pa.list_(pa.int32())})
_PAIRS: Final = pa.schema({name: pa.list_(pa.int32()) for name in ("input_ids", "lengths")})
_ENCODERS: Final = ("masked_lm", "text_embedding", NUMBER)


def data_of(task: str, folder: Path) -> DataRecord:
    """Write the prepared data of a task: 60 training rows and a few for validation."""
    return _WRITERS[task](folder)


def model_of(task: str) -> dict[str, Any]:
    """Return the configuration of a model for the task, without dropout."""
    return STILL if task in _ENCODERS else LLAMA


def write_reference(task: str, folder: Path, **more: Any) -> str:
    """Write a model with random weights and the head of the task. Return its address.

    Args:
        more: fields of the model's configuration to replace.
    """
    torch.manual_seed(1)
    size = VOCABULARY + (len(_SENTINELS) if task == "denoising" else 0)
    fields = {**model_of(task), "vocab_size": size, **more}
    auto: Any = AutoModelForCausalLM
    if task in _CLASSES:
        auto, fields["id2label"] = (
            AutoModelForSequenceClassification,
            dict(enumerate(_CLASSES[task])),
        )
    elif task == "masked_lm":
        auto = AutoModelForMaskedLM
    auto.from_config(AutoConfig.for_model(**fields)).save_pretrained(folder)
    return str(folder)


def _packed(folder: Path, task: str = "causal_lm") -> DataRecord:
    held_out = language_rows(_HELD_OUT, seed=1)
    return write_data(folder, language_rows(_TRAINED), held_out, task=task)


def _classified(folder: Path) -> DataRecord:
    return write_data(
        folder,
        with_texts(class_rows(_TRAINED)),
        with_texts(class_rows(_HELD_OUT, seed=1)),
        task="sequence_classification",
        schema=TEXTS,
        labels=LABELS,
    )


def _numbered(folder: Path) -> DataRecord:
    """Write texts with numbers whose mean is far from 0."""
    rows = [
        {**row, "label": 500.0 + 7.5 * row["label"]}
        for row in with_texts(class_rows(_TRAINED + _HELD_OUT))
    ]
    held_out, schema = rows[_TRAINED:], TEXTS.set(1, pa.field("label", pa.float64()))
    return write_data(folder, rows[:_TRAINED], held_out, task=NUMBER, schema=schema)


def _with_label_sets(folder: Path) -> DataRecord:
    """Write texts with the label of the class, also the next one if they are long, or with none."""
    rows = []
    for number, row in enumerate(with_texts(class_rows(_TRAINED + _HELD_OUT))):
        few = [row["label"], (row["label"] + 1) % len(LABELS)][: 1 + (len(row["input_ids"]) > 12)]
        rows.append({**row, "label": sorted(few) if number % 10 else []})
    schema = TEXTS.set(TEXTS.get_field_index("label"), pa.field("label", pa.list_(pa.int32())))
    held_out = rows[_TRAINED:]
    return write_data(
        folder, rows[:_TRAINED], held_out, task=MULTI_LABEL, schema=schema, labels=LABELS
    )


def _texts(folder: Path, task: str) -> DataRecord:
    rows = [{"input_ids": row["input_ids"]} for row in language_rows(_TRAINED + _HELD_OUT)]
    return write_data(folder, rows[:_TRAINED], rows[_TRAINED:], task=task, schema=_IDS)


def _masked(folder: Path) -> DataRecord:
    data = _texts(folder, "masked_lm")
    tokenizer = load_tokenizer(folder / "tokenizer")
    tokenizer.mask_token = "w2"
    tokenizer.save_pretrained(folder / "tokenizer")
    return data


def _denoised(folder: Path) -> DataRecord:
    data = _texts(folder, "denoising")
    tokenizer = load_tokenizer(folder / "tokenizer")
    tokenizer.add_special_tokens({"extra_special_tokens": list(_SENTINELS)})
    tokenizer.save_pretrained(folder / "tokenizer")
    return data


def _preferred(folder: Path) -> DataRecord:
    """Write pairs of answers, of which one goes on counting and the other does not."""
    rows = []
    generator = np.random.default_rng(0)
    for _ in range(_TRAINED + _HELD_OUT):
        row = packed_row([int(generator.integers(4, 12)), 9], generator)
        first = row["lengths"][0]
        row["targets"] = [0, 0] + [1] * (first - 2) + [0, 0] + [1] * 7
        row["input_ids"][first + 2 :] = row["input_ids"][-1 : first + 1 : -1]
        rows.append(row)
    return write_data(folder, rows[:_TRAINED], rows[_TRAINED:], task="preference")


def _marked(folder: Path) -> DataRecord:
    """Write answers: a good one goes on counting, and a bad one counts backward."""
    rows = []
    generator = np.random.default_rng(0)
    for index in range(_TRAINED + _HELD_OUT):
        row = packed_row([int(generator.integers(5, 12))], generator)
        row["desirable"] = index % 2 == 0
        row["targets"] = [0, 0] + [1] * (row["lengths"][0] - 2)
        if not row["desirable"]:
            row["input_ids"][2:] = row["input_ids"][:1:-1]
        rows.append(row)
    held_out, schema = rows[_TRAINED:], UnpairedPreferenceEncoder.schema
    return write_data(folder, rows[:_TRAINED], held_out, task="unpaired_preference", schema=schema)


def _paired(folder: Path) -> DataRecord:
    """Write texts, each with a counterpart that follows from it."""
    texts = [row["input_ids"] for row in class_rows(_TRAINED + _HELD_OUT, classes=8)]
    rows = [
        {
            "input_ids": [*text, *(2 + 5 * token % (VOCABULARY - 2) for token in text)],
            "lengths": 2 * [len(text)],
        }
        for text in texts
    ]
    held_out = rows[_TRAINED:]
    return write_data(folder, rows[:_TRAINED], held_out, task="text_embedding", schema=_PAIRS)


_WRITERS: Final[Mapping[str, Callable[[Path], DataRecord]]] = {
    "causal_lm": _packed,
    "denoising": _denoised,
    "masked_lm": _masked,
    "preference": _preferred,
    "sequence_classification": _classified,
    NUMBER: _numbered,
    "supervised_finetuning": partial(_packed, task="supervised_finetuning"),
    "text_embedding": _paired,
    "unpaired_preference": _marked,
    MULTI_LABEL: _with_label_sets,
    MULTI_TASK: write_parts,
}
TASKS: Final = tuple(_WRITERS)

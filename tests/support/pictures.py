"""Real images that packages ship, as files in folders of their classes, and their prepared data."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sklearn import datasets

from steadytrain.components.preprocess.step import run as preprocess
from steadytrain.components.shared.config import RunConfig, load
from steadytrain.components.shared.records import DataRecord

SMALL = [
    "data.images.size=8",
    "model.config={model_type: vit, hidden_size: 32, intermediate_size: 64, "
    "num_hidden_layers: 2, num_attention_heads: 2, patch_size: 2, "
    "hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0}",
]
"""A model that learns scikit-learn's digits in seconds."""


def digits() -> tuple[Any, Any]:
    """Return scikit-learn's 1,797 digits: (images, 8, 8), uint8, and their classes."""
    found = datasets.load_digits()
    return (found.images * 15).astype(np.uint8), found.target


def written(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    """Return the content of an image file."""
    content = io.BytesIO()
    picture = image if isinstance(image, Image.Image) else Image.fromarray(np.asarray(image))
    picture.save(content, kind, **options)
    return content.getvalue()


def write_folders(
    folder: Path, images: Iterable[Any], labels: Iterable[Any], kind: str = "PNG"
) -> Path:
    """Write each image to the folder of its class, and return the folder of all."""
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        path = folder / str(label) / f"{number:05}.{kind.lower()}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image if isinstance(image, bytes) else written(image, kind))
    return folder


def noise(count: int, size: int = 8, seed: int = 0) -> Any:
    """Return random images: (count, size, size), uint8."""
    return np.random.default_rng(seed).integers(256, size=(count, size, size), dtype=np.uint8)


def image_config(source: Path, *overrides: str) -> RunConfig:
    """Return the configuration of a run beside its images."""
    fields = [f"data.source=[{source}]", f"output={source.parent / 'output'}", "run=images"]
    return load("images", [*fields, *SMALL, *overrides])


def prepared(source: Path, *overrides: str) -> tuple[RunConfig, DataRecord]:
    """Prepare images."""
    config = image_config(source, *overrides)
    return config, preprocess(config)

"""Load an exported model of images and predict: needs Torch, Transformers, Pillow and NumPy.

A model is exported with a copy of this file and of `pixels.py`, so it imports no steadytrain.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

SETTINGS = "images.json"
_AT_ONCE = 64


class Predictor:
    """A model with its preparation.

    labels: the classes, in the order of the outputs.
    """

    def __init__(self, folder: Path | str, device: str = "cpu") -> None:
        import torch
        from transformers import AutoModelForImageClassification

        folder = Path(folder).absolute()
        self.settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        self.labels: list[str] = self.settings["labels"]
        self.pixels = _module(folder / "pixels.py")
        loaded: Any = AutoModelForImageClassification.from_pretrained(
            folder, local_files_only=True, dtype=torch.float32, trust_remote_code=False
        )
        self.model, self.device = loaded.to(device).eval(), device

    @property
    def names(self) -> list[str]:
        """The names of what is predicted."""
        return ["prediction", *(f"probability_{label}" for label in self.labels)]

    def rows(self, images: Sequence[Any]) -> list[dict[str, Any]]:
        """Return, for each image, its `prediction`, and `probability_CLASS` for each class.

        Args:
            images: each the content of a file (bytes), its path, a picture of Pillow, or an array
                of whole numbers from 0 to 255: (height, width) or (height, width, channels).

        Raises:
            ValueError: an image cannot be read. The message has its index.
        """
        records = [
            self.probabilities(images[start : start + _AT_ONCE], start)
            for start in range(0, len(images), _AT_ONCE)
        ]
        return [
            dict(zip(self.names, [self.labels[int(row.argmax())], *map(float, row)], strict=True))
            for rows in records
            for row in rows
        ]

    def probabilities(self, images: Sequence[Any], first: int = 0) -> Any:
        """Return the probability of each class: (images, classes).

        Args:
            first: the index of the first image, for messages.
        """
        import torch

        result = []
        for index, image in enumerate(images, start=first):
            try:
                result.append(self.prepared(image))
            except (ValueError, OSError) as error:
                raise ValueError(f"image {index} cannot be read: {error}") from error
        mean, deviation = (
            np.array(self.settings[name], np.float32).reshape(1, -1, 1, 1)
            for name in ("mean", "deviation")
        )
        values = np.stack(result).transpose(0, 3, 1, 2).astype(np.float32) / np.float32(255)
        inputs = torch.from_numpy((values - mean) / deviation).to(self.device)
        with torch.inference_mode():
            logits = self.model(pixel_values=inputs).logits
        return logits.double().softmax(-1).cpu().numpy()

    def prepared(self, image: Any) -> Any:
        """Return the pixels that the model reads: (height, width, channels)."""
        return self.pixels.read(image, self.settings)


def _module(path: Path) -> Any:
    spec: Any = importlib.util.spec_from_file_location("image_pixels", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

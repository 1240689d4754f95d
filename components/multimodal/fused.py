"""A model of texts, images and other columns: its network, its inputs, and predictions.

A model is exported with a copy of this file, of `pixels.py` and of `table.py`, so it imports no
steadytrain. It needs Torch, Transformers, Pillow, NumPy and safetensors.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

SETTINGS, WEIGHTS = "fused.json", "model.safetensors"
TEXT, IMAGE = "text", "image"
"""Folders with the configurations of the encoders, and the tokenizer."""
_AT_ONCE = 64


class Fused(torch.nn.Module):
    """Encoders, and a head that reads what they say together.

    text, image: Transformers' models without heads; None if the data have no such column.
    columns: of the matrix of the other columns.
    images: columns with images. One encoder reads all of them, and each has its own layer after it.
    """

    def __init__(
        self,
        text: Any,
        image: Any,
        *,
        columns: int,
        classes: int,
        width: int,
        dropout: float,
        images: int = 1,
    ) -> None:
        super().__init__()
        self.text, self.image = text, image
        if text is not None:
            self.text_part = _part(text.config.hidden_size, width)
        if image is not None:
            self.image_part = _part(output_size(image), width)
            others = (_part(output_size(image), width) for _ in range(images - 1))
            self.other_image_parts = torch.nn.ModuleList(others)
        if columns:
            self.table_part = _part(columns, width)
        count = (text is not None) + images * (image is not None) + bool(columns)
        self.columns = columns
        self.head = torch.nn.Sequential(
            torch.nn.Dropout(dropout),
            torch.nn.Linear(count * width, width),
            torch.nn.GELU(),
            torch.nn.Dropout(dropout),
            torch.nn.Linear(width, classes),
        )

    def forward(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the logits: (records, classes). What a record does not have counts as zeros."""
        parts = []
        if self.text is not None:
            mask = batch["attention_mask"]
            states = self.text(input_ids=batch["input_ids"], attention_mask=mask).last_hidden_state
            share = mask.unsqueeze(-1).to(states.dtype)
            mean = (states * share).sum(1) / share.sum(1).clamp(min=1)
            parts.append(self.text_part(mean) * batch["has_text"])
        if self.image is not None:
            features = self.image(pixel_values=batch["pixel_values"])
            pooled = getattr(features, "pooler_output", None)
            states = features.last_hidden_state
            pooled = states.mean(1) if pooled is None else pooled.flatten(1)
            there = batch["has_image"]
            for column, part in enumerate((self.image_part, *self.other_image_parts)):
                own = slice(column * len(there), (column + 1) * len(there))
                parts.append(part(pooled[own]) * there[:, column, None])
        if self.columns:
            parts.append(self.table_part(batch["table"]))
        logits: torch.Tensor = self.head(torch.cat(parts, dim=1))
        return logits


def _part(inputs: int, width: int) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(inputs, width), torch.nn.LayerNorm(width), torch.nn.GELU()
    )


def output_size(model: Any) -> int:
    """Return the number of values that an encoder of images returns."""
    config, timm = model.config, getattr(model, "timm_model", None)
    if timm is not None:
        return int(timm.head_hidden_size)
    sizes = getattr(config, "hidden_sizes", None)
    result = sizes[-1] if sizes else getattr(config, "hidden_size", None)
    if not isinstance(result, int):
        raise ValueError(f"{config.model_type} models do not say how wide their output is")
    return result


def learns_pooler(model: Any) -> bool:
    """Return whether an encoder has a layer with weights after its states."""
    pooler = getattr(model, "pooler", None)
    return pooler is not None and len(pooler.state_dict()) > 0


class Inputs:
    """Turns records into what the network reads.

    settings: the content of `SETTINGS`.
    table, pixels: the modules of `table.py` and `pixels.py`.
    tokenizer: None without columns of text.
    """

    def __init__(
        self, settings: Mapping[str, Any], table: Any, pixels: Any, tokenizer: Any
    ) -> None:
        self.settings, self.pixels, self.tokenizer = settings, pixels, tokenizer
        self.table = table
        self.preparation = table.Preparation(settings["kinds"], settings["levels"])
        if tokenizer is not None and tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token

    def batch(
        self, records: Sequence[Mapping[str, Any]], images: Sequence[Any], *, strict: bool
    ) -> dict[str, torch.Tensor]:
        """Return the arguments of the network.

        Args:
            images: of each record, by column with images: pixels (height, width, channels) in 8
                bits, or None where there is no image.
            strict: whether a value of another kind is an error. Otherwise it counts as missing.
        """
        result = dict[str, torch.Tensor]()
        if self.tokenizer is not None:
            texts = [self.table.text_of(record, self.settings["texts"]) for record in records]
            tokens = self.tokenizer(
                texts,
                truncation=True,
                max_length=self.settings["length"],
                padding=True,
                return_tensors="pt",
            )
            result |= {name: tokens[name] for name in ("input_ids", "attention_mask")}
            result["has_text"] = torch.tensor([[float(bool(text))] for text in texts])
        if self.settings["image"] is not None:
            result |= self._images(images)
        if self.settings["kinds"]:
            result["table"] = torch.from_numpy(self.matrix(records, strict=strict))
        return result

    def matrix(self, records: Sequence[Mapping[str, Any]], *, strict: bool) -> Any:
        """Return the other columns: standardized, with a column for each that may be missing."""
        dense = self.preparation.one_hot(self.preparation.matrix(records, strict=strict))
        scale = (np.array(self.settings[name]) for name in ("fill", "center", "spread"))
        missing = np.isnan(dense[:, self.settings["gaps"]])
        filled = self.table.standardized(dense, *scale)
        return np.concatenate([filled, missing], axis=1).astype(np.float32)

    @property
    def pictures(self) -> list[str]:
        """The columns with images."""
        image = self.settings["image"]
        if image is None:
            return []
        # Models of earlier versions have one column.
        return list(image["columns"] if "columns" in image else [image["column"]])

    def _images(self, images: Sequence[Sequence[Any]]) -> dict[str, torch.Tensor]:
        """Return the pixels, column by column: (columns * records, channels, height, width)."""
        image = self.settings["image"]
        channels = len(image["mean"])
        blank = np.zeros((image["size"], image["size"], channels), np.uint8)
        columns = zip(*images, strict=True)
        stacked = np.stack([blank if one is None else one for each in columns for one in each])
        values = torch.from_numpy(stacked).permute(0, 3, 1, 2).float() / 255
        mean, deviation = (
            torch.tensor(image[name]).view(1, -1, 1, 1) for name in ("mean", "deviation")
        )
        there = torch.tensor([[float(one is not None) for one in each] for each in images])
        return {"pixel_values": (values - mean) / deviation, "has_image": there}

    def images_of(self, record: Mapping[str, Any]) -> list[Any]:
        """Return the pixels of a record's images by column, None where there is none.

        An image is the content of a file (bytes), its path, or an array of whole numbers up to 255.

        Raises:
            ValueError: one cannot be read.
        """
        result = []
        for name in self.pictures:
            try:
                result.append(self._image_of(record.get(name)))
            except (ValueError, OSError) as error:
                raise ValueError(f"{name!r} cannot be read: {error}") from error
        return result

    def _image_of(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            value = value.get("bytes")
        if value is None or (isinstance(value, str | float) and self.table.is_missing(value)):
            return None
        return self.pixels.read(value, self.settings["image"])


def read(folder: Path, table: Any, pixels: Any) -> tuple[Fused, Inputs]:
    """Return an exported model and what makes its inputs.

    Args:
        table, pixels: as for `Inputs`.
    """
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    built = dict[str, Any]()
    for name in (TEXT, IMAGE):
        built[name] = None
        if (folder / name / "config.json").is_file():
            config = AutoConfig.from_pretrained(
                folder / name, local_files_only=True, trust_remote_code=False
            )
            built[name] = AutoModel.from_config(config, trust_remote_code=False)
    weights, text = load_file(folder / WEIGHTS), built[TEXT]
    for name, part in built.items():
        # It may be trained without a layer that its configuration has.
        if learns_pooler(part) and not any(key.startswith(f"{name}.pooler.") for key in weights):
            part.pooler = None
    tokenizer = None
    if text is not None:
        tokenizer = AutoTokenizer.from_pretrained(
            folder / TEXT, local_files_only=True, trust_remote_code=False
        )
    model = Fused(text, built[IMAGE], **settings["network"])
    model.load_state_dict(weights)
    return model.eval(), Inputs(settings, table, pixels, tokenizer)


class Predictor:
    """A model with its preparation.

    labels: the classes, in the order of the outputs.
    """

    def __init__(self, folder: Path | str, device: str = "cpu") -> None:
        folder = Path(folder).absolute()
        table, pixels = (_module(folder / name) for name in ("table.py", "pixels.py"))
        model, self.inputs = read(folder, table, pixels)
        self.model, self.device = model.to(device), device
        self.labels: list[str] = self.inputs.settings["labels"]

    @property
    def names(self) -> list[str]:
        """The names of what is predicted."""
        return ["prediction", *(f"probability_{label}" for label in self.labels)]

    def unseen(self, records: Sequence[Mapping[str, Any]]) -> dict[str, int]:
        """Return how many values, by column, are categories that training did not see."""
        counts: dict[str, int] = self.inputs.preparation.unseen(records)
        return counts

    def rows(
        self, records: Sequence[Mapping[str, Any]], *, strict: bool = True
    ) -> list[dict[str, Any]]:
        """Return, for each record, its `prediction`, and `probability_CLASS` for each class.

        Args:
            strict: see `Inputs.batch`.

        Raises:
            ValueError: a column is absent, an image cannot be read, or a value is of another kind
                than in training.
        """
        self._check(records)
        result = list[dict[str, Any]]()
        for start in range(0, len(records), _AT_ONCE):
            for row in self._probabilities(records[start : start + _AT_ONCE], start, strict):
                answer = [self.labels[int(row.argmax())], *map(float, row)]
                result.append(dict(zip(self.names, answer, strict=True)))
        return result

    def _probabilities(self, records: Sequence[Mapping[str, Any]], first: int, strict: bool) -> Any:
        images = []
        for index, record in enumerate(records, start=first):
            try:
                images.append(self.inputs.images_of(record))
            except ValueError as error:
                raise ValueError(f"the image of record {index} in the column {error}") from error
        batch = self.inputs.batch(records, images, strict=strict)
        with torch.inference_mode():
            logits = self.model({name: value.to(self.device) for name, value in batch.items()})
        return logits.double().softmax(-1).cpu().numpy()

    def _check(self, records: Sequence[Mapping[str, Any]]) -> None:
        for name in (*self.inputs.settings["texts"], *self.inputs.pictures):
            if records and not any(name in record for record in records):
                raise ValueError(f"the records have no column {name!r}; the model learned from it")


def _module(path: Path) -> Any:
    spec: Any = importlib.util.spec_from_file_location(f"fused_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load(folder: Path | str) -> Predictor:
    """Return an exported model."""
    return Predictor(folder)

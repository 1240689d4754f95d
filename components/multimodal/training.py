"""Train encoders of texts and images, and a head that reads them with the other columns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from steadytrain.components.images import networks, pixels
from steadytrain.components.images.encoder import PIXELS, Images
from steadytrain.components.images.training import ImageTraining
from steadytrain.components.multimodal.encoder import IMAGES, pixels_by_column, read_schema
from steadytrain.components.multimodal.fused import Fused, Inputs, learns_pooler, output_size
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.foreign import foreign
from steadytrain.components.shared.model_source import resolve_config, resolve_model
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tabular import model as table
from steadytrain.components.tabular.encoder import FEATURES, parsed
from steadytrain.components.tasks.base import Batch, LossSum, Row
from steadytrain.components.tasks.encoding.tokens import load_tokenizer
from steadytrain.components.tasks.models import build
from steadytrain.components.tasks.scoring.table import read_batches
from steadytrain.components.techniques.contrastive_texts.loss import without_pooler


class MultimodalClassification(ImageTraining):
    """Predict the class of each record."""

    task = "multimodal_classification"

    def __init__(self, config: RunConfig, data: DataRecord) -> None:
        super().__init__(config, data)
        self.schema = read_schema(data)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer; None without columns of text."""
        if not self.schema.texts:
            return None
        return load_tokenizer(self.data.path(self.data.tokenizer))

    @cached_property
    def inputs(self) -> Inputs:
        """What makes the inputs of the network, fitted on the training side."""
        return Inputs(self.settings, table, pixels, self.tokenizer)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings of an exported model, but for `network`."""
        schema, images = self.schema, self.config.data.images
        preparation = table.Preparation(schema.others)
        records = [
            record
            for batch in read_batches(self.data, "train", [FEATURES])
            for record in parsed(batch)
        ]
        preparation.fit(records)
        dense = preparation.one_hot(preparation.matrix(records, strict=False))
        there = ~np.isnan(dense)
        count = np.maximum(there.sum(axis=0), 1)
        fill = np.where(there, dense, 0.0).sum(axis=0) / count
        spread = np.sqrt(np.where(there, np.square(dense - fill), 0.0).sum(axis=0) / count)
        image = None
        if schema.images is not None:
            mean, deviation = self._scale(schema.images)
            image = {
                "columns": schema.pictures,
                "size": images.size,
                "color": images.color,
                "resize": images.resize,
                "interpolation": images.interpolation,
                "max_pixels": images.max_pixels,
                "mean": mean,
                "deviation": deviation,
            }
        return {
            "labels": self.data.labels,
            "texts": schema.texts,
            "length": self.data.sequence_length,
            "image": image,
            "kinds": preparation.kinds,
            "levels": preparation.levels,
            "fill": fill.tolist(),
            "center": fill.tolist(),
            "spread": np.where(spread > 1e-9, spread, 1.0).tolist(),
            "gaps": np.flatnonzero(~there.all(axis=0)).tolist(),
        }

    @property
    def network(self) -> dict[str, Any]:
        """The sizes of the network."""
        fusion = self.config.model.fusion
        return {
            "columns": len(self.settings["fill"]) + len(self.settings["gaps"]),
            "classes": len(self.data.labels),
            "width": fusion.width,
            "dropout": fusion.dropout,
            "images": max(1, len(self.schema.pictures)),
        }

    def build_model(self) -> torch.nn.Module:
        return Fused(self._text_encoder(), self._image_encoder(), **self.network)

    def _text_encoder(self) -> Any:
        from transformers import AutoModel

        model = self.config.model
        given = f"model.base = {model.base!r}" if model.base else f"model.config = {model.config}"
        if not self.schema.texts:
            if model.base or model.config:
                raise BadInput(
                    f"{given}: no column is text, so there is nothing for it to read",
                    remedy="leave it out, or name a column in data.columns.text",
                )
            return None
        if not (model.base or model.config):
            raise BadInput(
                f"the column {self.schema.texts[0]!r} is text, and the model has no encoder of "
                "texts",
                remedy="set model.base, or model.config to train one from scratch, or leave the "
                "column out with data.features",
            )
        encoder: Any = build(AutoModel, self.config, self.data, self.tokenizer)
        if encoder.main_input_name != "input_ids" or encoder.config.is_encoder_decoder:
            raise BadInput(
                f"{given}: {encoder.config.model_type} models do not encode a text alone",
                remedy="use an encoder such as bert",
            )
        return without_pooler(encoder)

    def _image_encoder(self) -> Any:
        from transformers import AutoConfig, AutoModel

        fields, base = self.config.model.fusion.image, self.config.model.fusion.image_base
        if not self.schema.pictures:
            if fields or base:
                given = f"image_base = {base!r}" if base else f"image = {fields}"
                raise BadInput(
                    f"model.fusion.{given}: no column has images",
                    remedy="leave it out, or name the column in data.columns.image",
                )
            return None
        if base:
            return self._pretrained(base)
        if not fields:
            raise BadInput(
                f"the column {self.schema.pictures[0]!r} has images, and the model has no encoder "
                "of images",
                remedy="set model.fusion.image, such as {model_type: convnext}, or "
                "model.fusion.image_base to the address of a pretrained one",
            )
        images = self.config.data.images
        with foreign(
            "model.fusion.image cannot be built",
            f"change the named field; Transformers' documentation of {fields['model_type']!r} "
            "lists its values",
        ):
            known = AutoConfig.for_model(fields["model_type"]).to_dict()
            of_data = {"image_size": images.size, "num_channels": images.channels}
            for name in fields.keys() & of_data.keys():
                if fields[name] != of_data[name]:
                    raise BadInput(
                        f"model.fusion.image.{name} = {fields[name]}: the images have "
                        f"{of_data[name]}",
                        remedy="leave it out, or change data.images",
                    )
            filled = {name: value for name, value in of_data.items() if name in known} | fields
            model: Any = AutoModel.from_config(
                AutoConfig.for_model(**filled), dtype=torch.float32, trust_remote_code=False
            )
            if model.main_input_name != "pixel_values":
                raise BadInput(
                    f"model.fusion.image.model_type = {fields['model_type']!r}: it reads no images",
                    remedy="use an encoder of images such as convnext or vit",
                )
            output_size(model)
        return model

    def _pretrained(self, base: str) -> Any:
        """Return the encoder of images at an address."""
        from transformers import AutoModel

        given = self.config.model.model_copy(update={"base": base, "config": {}})
        arguments = networks.timms_arguments(resolve_config(base, self.config))
        config = self.config.model_copy(update={"model": given})
        model: Any = build(AutoModel, config, self.data, None, **arguments)
        if model.main_input_name != "pixel_values":
            raise BadInput(
                f"model.fusion.image_base = {base!r}: {model.config.model_type} models read no "
                "images",
                remedy="give an encoder of images such as convnext or vit",
            )
        networks.check_inputs(model, self.config.data.images, "model.fusion.image_base")
        # Files of a model with a head often lack it.
        return without_pooler(model) if learns_pooler(model) else model

    def ready(self, model: torch.nn.Module) -> Sequence[str]:
        read, images = self._read, self.config.data.images
        remarks = networks.differences(read, images, "model.fusion.image_base") if read else ()
        return [*remarks, *super().ready(model)]

    @cached_property
    def _read(self) -> networks.Read | None:
        """How the pretrained encoder of images reads them; None if its files don't say."""
        base = self.config.model.fusion.image_base
        return networks.of_folder(resolve_model(base, self.config)) if base else None

    def _scale(self, found: Images) -> tuple[list[float], list[float]]:
        """Return the mean and deviation of each channel: of the encoder, or of the data.

        Raises:
            BadInput: those of the encoder are asked for, and it has none for these channels.
        """
        images, field = self.config.data.images, "model.fusion.image_base"
        if images.normalization != "data" and self._read:
            return networks.scale(self._read, images, field)
        if images.normalization == "model":
            raise BadInput(
                f"data.images.normalization = 'model': {field} names no encoder with a "
                f"{networks.PROCESSOR}",
                remedy="set it to data, or leave it out",
            )
        return found.mean, found.deviation

    def collate(self, rows: Sequence[Row]) -> Batch:
        records = [json.loads(row[FEATURES]) for row in rows]
        images = [self.pixels_of(row[IMAGES], row[PIXELS]) for row in rows]
        targets = torch.tensor([int(row["label"]) for row in rows])
        return {**self.inputs.batch(records, images, strict=False), "targets": targets}

    def pixels_of(self, columns: str, stored: bytes) -> list[Any]:
        """Return the stored pixels of a record's images, by column with images.

        Args:
            columns: see `encoder.IMAGES`.

        Returns:
            For each (height, width, channels); None if there is no image.
        """
        images, parts = self.config.data.images, pixels_by_column(columns, stored)
        shape = images.size, images.size, images.channels
        return [
            np.frombuffer(parts[name], np.uint8).reshape(shape) if name in parts else None
            for name in self.schema.pictures
        ]

    def compute_loss(self, model: torch.nn.Module, batch: Batch) -> LossSum:
        return LossSum(self.criterion(self.logits(model, batch), batch["targets"]))

    def logits(self, model: Any, batch: Batch) -> torch.Tensor:
        result: torch.Tensor = model(batch).float()
        return result

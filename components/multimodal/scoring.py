"""Score a model of texts, images and tables, export and load it, and log it to MLflow."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import torch

from steadytrain.components.images import networks, pixels
from steadytrain.components.images.encoder import PIXELS
from steadytrain.components.images.scoring import check_preparation, png
from steadytrain.components.multimodal import fused
from steadytrain.components.multimodal.encoder import IMAGES, read_schema
from steadytrain.components.multimodal.training import MultimodalClassification
from steadytrain.components.shared.artifact import Artifact, timed
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tabular import model as table
from steadytrain.components.tabular.encoder import parsed
from steadytrain.components.tabular.model import plain_number
from steadytrain.components.tasks.base import FEW, Components
from steadytrain.components.tasks.scoring.classification import ClassScorer
from steadytrain.components.tasks.served import ServedPackager, readable

_EXAMPLES: Final = 3
_CODE: Final = {"model.py": fused, "table.py": table, "pixels.py": pixels}
_NEEDED: Final = ("mlflow", "numpy", "pandas", "pillow", "safetensors", "torch", "transformers")


class MultimodalScorer(ClassScorer):
    """Scores predicted classes."""

    def score(self, components: Components, records: pa.Table) -> pa.Table:
        model, inputs = components["model"].eval(), components["inputs"]
        device = next(model.parameters()).device
        values, images = parsed(records), _pixels(self.config, self.data, records)

        def logits(places: Sequence[int]) -> torch.Tensor:
            some, pictures = [values[one] for one in places], [images[one] for one in places]
            batch = inputs.batch(some, pictures, strict=False)
            result: torch.Tensor = model({name: it.to(device) for name, it in batch.items()})
            return result

        return self._scored(records, range(len(values)), logits)


def _pixels(config: RunConfig, data: DataRecord, records: pa.Table) -> list[list[Any]]:
    """Return the pixels of each test record, by column with images."""
    task = MultimodalClassification(config, data)
    columns: list[Any] = records.column(IMAGES).to_pylist()
    stored: list[Any] = records.column(PIXELS).to_pylist()
    return [*map(task.pixels_of, columns, stored)]


class MultimodalPackager(ServedPackager):
    """Exports a model with its preparation and the code for both, and logs it to MLflow."""

    def export(self, model: torch.nn.Module, folder: Path) -> None:
        from safetensors.torch import save_file

        whole: Any = model
        task = MultimodalClassification(self.config, self.data)
        weights = {
            name: one.detach().cpu().contiguous() for name, one in model.state_dict().items()
        }
        save_file(weights, folder / fused.WEIGHTS)
        for name, part in ((fused.TEXT, whole.text), (fused.IMAGE, whole.image)):
            if part is not None:
                part.config.save_pretrained(folder / name)
        if task.tokenizer is not None:
            task.tokenizer.save_pretrained(folder / fused.TEXT)
        content = {**task.settings, "network": task.network}
        text = json.dumps(content, indent=1, ensure_ascii=False)
        (folder / fused.SETTINGS).write_text(f"{text}\n", encoding="utf-8")
        for name, module in _CODE.items():
            shutil.copyfile(str(module.__file__), folder / name)

    def load_exported(self, folder: Path) -> Components:
        """Load a model, with the code of this version and not with that in the folder.

        Raises:
            BadInput: it cannot be read, or it reads other images or predicts other classes than
                those of the data.
        """
        with readable(folder, "texts and images", RuntimeError):
            model, inputs = fused.read(folder.absolute(), table, pixels)
            if image := inputs.settings["image"]:
                # Older models do not name it.
                image.setdefault("interpolation", "bilinear")
        self.check_labels(inputs.settings["labels"])
        if image:
            check_preparation(image, self.config.data.images)
        return {"model": model, "inputs": inputs}

    def measured(self, folder: Path, records: pa.Table, *, most: int = FEW) -> Artifact:
        """Measure an exported model, which reads the image of a record as the content of a file."""
        schema, some = read_schema(self.data), records.slice(0, most)
        pictures = [
            [None if one is None else png(one) for one in each]
            for each in _pixels(self.config, self.data, some)
        ]

        def opened() -> Callable[[Mapping[str, Any]], object]:
            model = fused.load(folder)
            # As for scores, values of another kind count as missing.
            return lambda record: model.rows([record], strict=False)

        # A record alone may lack a column that others have.
        names = dict.fromkeys((*schema.texts, *schema.others))
        each = [
            {**names, **record, **dict(zip(schema.pictures, images, strict=True))}
            for record, images in zip(parsed(some), pictures, strict=True)
        ]
        return timed(folder, opened, each, late_libraries=True)

    def log_model(
        self, folder: Path, *, name: str, records: pa.Table, metadata: dict[str, str]
    ) -> str:
        import pandas as pd
        from mlflow.types import ColSpec
        from mlflow.types.schema import AnyType

        loaded = self.load_exported(folder)["inputs"]
        settings = loaded.settings
        first = records.slice(0, _EXAMPLES)
        values, kinds = parsed(first), settings["kinds"]
        example: dict[str, list[Any]] = {
            column: [
                plain_number(record.get(column))
                if kinds.get(column) == "number"
                else record.get(column)
                for record in values
            ]
            for column in (*settings["texts"], *kinds)
        }
        # A date may be text, or a date of pandas. A column without a text has no type.
        types = {"number": "double", "date": AnyType(), "category": AnyType()}
        inputs = [ColSpec(AnyType(), column, required=False) for column in settings["texts"]]
        inputs += [ColSpec(types[kind], column, required=False) for column, kind in kinds.items()]
        image, pictures = folder / fused.IMAGE, _pixels(self.config, self.data, first)
        for place, column in enumerate(loaded.pictures):
            inputs.append(ColSpec("binary", column, required=False))
            example[column] = [
                None if each[place] is None else png(each[place]) for each in pictures
            ]
        return self.log_folder(
            folder,
            name=name,
            inputs=inputs,
            example=pd.DataFrame(example),
            metadata=metadata,
            packages=[*_NEEDED, *(networks.packages(image) if image.is_dir() else ())],
        )

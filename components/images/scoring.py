"""Score a model of images, export and load it, and log it to MLflow."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import torch
from PIL import Image

from steadytrain.components.images import networks
from steadytrain.components.images.encoder import PIXELS
from steadytrain.components.images.predictor import SETTINGS, Predictor
from steadytrain.components.images.training import image_scale, scaled
from steadytrain.components.shared.artifact import Artifact, timed
from steadytrain.components.shared.config.data_sections import ImagesConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tasks.base import FEW, Components
from steadytrain.components.tasks.loaded_weights import dtype_of_files, note_dtype
from steadytrain.components.tasks.packaging import never_wrapped, save_model
from steadytrain.components.tasks.scoring.classification import ClassScorer
from steadytrain.components.tasks.served import ServedPackager, readable

_EXAMPLES: Final = 3
_CODE: Final = ("pixels.py", "predictor.py")
_PREPARATION: Final = ("size", "color", "resize", "interpolation")
_NEEDED: Final = ("mlflow", "numpy", "pandas", "pillow", "safetensors", "torch", "transformers")


class ImageScorer(ClassScorer):
    """Scores predicted classes."""

    def score(self, components: Components, records: pa.Table) -> pa.Table:
        model, settings = components["model"].eval(), components["settings"]
        device = next(model.parameters()).device
        channels = len(settings["mean"])
        scale = settings["mean"], settings["deviation"]

        def logits(images: Sequence[bytes]) -> torch.Tensor:
            stacked = np.frombuffer(b"".join(images), np.uint8)
            size = settings["size"]
            pixels = torch.tensor(stacked.reshape(len(images), size, size, channels))
            inputs = scaled(pixels.permute(0, 3, 1, 2).to(device), scale)
            result: torch.Tensor = model(pixel_values=inputs).logits
            return result

        images: list[Any] = records.column(PIXELS).to_pylist()
        return self._scored(records, images, logits)


class ImagePackager(ServedPackager):
    """Exports a model with its preparation and the code for both, and logs it to MLflow."""

    def export(self, model: torch.nn.Module, folder: Path) -> None:
        given = self.config.model.export_dtype
        images = self.config.data.images
        mean, deviation = image_scale(self.config, self.data)
        networks.note_inputs(model, images, mean, deviation)
        with never_wrapped():
            save_model(model, folder, getattr(torch, given) if given else dtype_of_files(model))
        content = {
            **{name: getattr(images, name) for name in (*_PREPARATION, "max_pixels")},
            "mean": mean,
            "deviation": deviation,
            "labels": self.data.labels,
        }
        _write(folder / SETTINGS, content)
        # For Transformers' own pipeline, which reads all images in color.
        _write(
            folder / networks.PROCESSOR,
            {
                "image_processor_type": "ViTImageProcessor",
                "do_convert_rgb": images.color == "rgb",
                "do_resize": True,
                "size": {"height": images.size, "width": images.size},
                "resample": int(Image.Resampling[images.interpolation.upper()]),
                "do_rescale": True,
                "rescale_factor": 1 / 255,
                "do_normalize": True,
                "image_mean": mean,
                "image_std": deviation,
            },
        )
        for name in _CODE:
            shutil.copyfile(Path(__file__).with_name(name), folder / name)

    def load_exported(self, folder: Path) -> Components:
        """Load a model, with the code of this version and not with that in the folder.

        Raises:
            BadInput: it cannot be read, or it reads other images or predicts other classes than
                those of the data.
        """
        from transformers import AutoModelForImageClassification

        with readable(folder, "images"):
            settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
            # Older models do not name it.
            settings.setdefault("interpolation", "bilinear")
            model: Any = AutoModelForImageClassification.from_pretrained(
                folder.absolute(),
                dtype=torch.float32,
                local_files_only=True,
                trust_remote_code=False,
            )
        note_dtype(model, folder)
        self.check_labels(settings["labels"])
        check_preparation(settings, self.config.data.images)
        return {"model": model, "settings": settings}

    def measured(self, folder: Path, records: pa.Table, *, most: int = FEW) -> Artifact:
        """Measure an exported model, which reads each record as the content of a file."""

        def opened() -> Callable[[bytes], object]:
            model = Predictor(folder)
            return lambda content: model.rows([content])

        files = files_of(records.slice(0, most), self.config.data.images)
        return timed(folder, opened, files, late_libraries=True)

    def log_model(
        self, folder: Path, *, name: str, records: pa.Table, metadata: dict[str, str]
    ) -> str:
        import pandas as pd
        from mlflow.types import ColSpec

        first = files_of(records.slice(0, _EXAMPLES), self.config.data.images)
        return self.log_folder(
            folder,
            served=Path(__file__).with_name("served.py"),
            name=name,
            inputs=[ColSpec("binary", "image")],
            example=pd.DataFrame({"image": first}),
            metadata=metadata,
            packages=[*_NEEDED, *networks.packages(folder)],
        )


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(f"{json.dumps(content, indent=2)}\n", encoding="utf-8")


def files_of(records: pa.Table, images: ImagesConfig) -> list[bytes]:
    """Return the images of records, as files."""
    stored: list[Any] = records.column(PIXELS).to_pylist()
    shape = (images.size, images.size, images.channels)
    return [png(np.frombuffer(one, np.uint8).reshape(shape)) for one in stored]


def check_preparation(settings: Mapping[str, Any], images: ImagesConfig) -> None:
    """Raise BadInput if a model prepares images in another way than the data."""
    for name in _PREPARATION:
        wanted = getattr(images, name)
        if settings[name] != wanted:
            raise BadInput(
                f"the model reads images with data.images.{name} {settings[name]!r}, and the data "
                f"have {wanted!r}",
                remedy=f"set data.images.{name} to {settings[name]!r}, or register under another "
                "name",
            )


def png(pixels: Any) -> bytes:
    """Return an image, (height, width, channels), as a file."""
    content = io.BytesIO()
    Image.fromarray(pixels if pixels.shape[2] > 1 else pixels[..., 0]).save(content, "PNG")
    return content.getvalue()

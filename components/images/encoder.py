"""Read images with their classes. Nothing here imports torch."""

from __future__ import annotations

import base64
import hashlib
import io
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from PIL import Image
from pydantic import BaseModel, ConfigDict

from steadytrain.components.images.pixels import Unreadable, decoded, prepared
from steadytrain.components.shared.config import DataConfig
from steadytrain.components.shared.config.data_sections import ImagesConfig
from steadytrain.components.shared.left_out import readable
from steadytrain.components.shared.records import DataRecord, Side
from steadytrain.components.tasks.encoding.base import (
    COLUMNS,
    Content,
    Fitted,
)
from steadytrain.components.tasks.encoding.fields import Defect, class_of
from steadytrain.components.tasks.encoding.labeled_text import (
    ClassIndex,
    LabeledRows,
    trained_indices,
)

PIXELS: Final = "pixels"
"""Column of rows and of test records: bytes, as (height, width, channels)."""
SUFFIXES: Final = frozenset(
    {".png", ".jpg", ".jpeg", ".gif", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
)
_SHOWN: Final = 10
_FEW: Final = 20
"""Images of a class below which what they share is not judged."""


class Images(BaseModel):
    """What the images of the training side have in common.

    sizes, modes: number of images by the size and mode of their files, the most frequent first.
    mean, deviation: of each channel, from 0 to 1.
    found: sentences about what users should know.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    sizes: dict[str, int]
    modes: dict[str, int]
    mean: list[float]
    deviation: list[float]
    found: list[str] = []

    def remarks(self) -> Iterator[str]:
        yield from self.found

    def card(self) -> dict[str, Any]:
        """Return the fields of the data card."""
        return {
            "facts": {
                "sizes of the files": _listed(self.sizes),
                "modes of the files": _listed(self.modes),
                "mean of each channel": ", ".join(f"{value:.3f}" for value in self.mean),
                "deviation of each channel": ", ".join(f"{value:.3f}" for value in self.deviation),
            }
        }


@dataclass(frozen=True)
class ImageEncoder:
    """Images with one class each: that of their folder, or of a column."""

    data: DataConfig

    packed = False
    labeled = True
    tokenizer = None

    @property
    def whole_files(self) -> frozenset[str]:
        return frozenset() if self.data.columns.image else SUFFIXES

    @property
    def attached(self) -> tuple[Sequence[str], frozenset[str]] | None:
        return ([self.column], SUFFIXES) if self.data.columns.image else None

    @property
    def schema(self) -> pa.Schema:
        columns: dict[str, pa.DataType] = {
            PIXELS: pa.binary(self.data.images.size**2 * self.data.images.channels),
            "label": pa.int32(),
            "size": pa.string(),
            "mode": pa.string(),
        }
        return pa.schema(columns)

    @property
    def column(self) -> str:
        """The column with the image."""
        return next(iter(self.data.columns.images), "image")

    def columns(self) -> Sequence[Sequence[str]]:
        return [[self.column, self.data.columns.label]]

    def read(self, row: Mapping[str, Any]) -> Content:
        label = class_of(row, self.data.columns.label, self.data.labels)
        image = read_image(self.column, row.get(self.column), self.data.images)
        if image is None:
            raise Defect("missing_field", f"{self.column} is absent or null")
        text = json.dumps(image.facts)
        return Content(text, label, identity=image.identity, attachment=image.pixels)

    def test_columns(self, records: pa.Table) -> Mapping[str, Any]:
        pixels = records["attachment"].cast(pa.binary()).cast(self.schema.field(PIXELS).type)
        return {PIXELS: pixels, "label": records["label"]}

    def row_encoder(self, fitted: Fitted) -> LabeledRows:
        return LabeledRows(ClassIndex(trained_indices(fitted)), _values)

    def describe(self, sides: Mapping[Side, Iterable[pa.Table]]) -> Images:
        """Return what the images of the training side have in common."""
        channels = self.data.images.channels
        sums, squares, places = np.zeros(channels), np.zeros(channels), 0
        facts = {name: Counter[tuple[str, int]]() for name in ("size", "mode")}
        one_color = 0
        for table in sides["train"]:
            columns: dict[str, list[Any]] = table.select([*facts, "label", PIXELS]).to_pydict()
            for name, counts in facts.items():
                counts.update(zip(columns[name], columns["label"], strict=True))
            for one in columns[PIXELS]:
                pixels = np.frombuffer(one, np.uint8).reshape(-1, channels)
                shares = pixels / 255.0
                sums += shares.sum(0)
                squares += np.square(shares).sum(0)
                places += len(shares)
                one_color += bool((pixels == pixels[0]).all())
        mean = sums / max(1, places)
        deviation = np.sqrt(np.maximum(squares / max(1, places) - mean**2, 0))
        result = [*self._given_away(facts)]
        if one_color:
            result.append(f"{one_color:,} images of the training side are of one color")
        totals = {name: _totals(counts) for name, counts in facts.items()}
        return Images(
            sizes=totals["size"],
            modes=totals["mode"],
            mean=mean.tolist(),
            # A channel that is the same everywhere is not scaled.
            deviation=np.where(deviation > 1e-6, deviation, 1.0).tolist(),
            found=result,
        )

    @staticmethod
    def _given_away(facts: Mapping[str, Counter[tuple[str, int]]]) -> Iterator[str]:
        """Yield a sentence for each property of the files that tells all classes apart."""
        for name, counts in facts.items():
            classes, images = defaultdict[str, set[int]](set), Counter[int]()
            for (value, label), count in counts.items():
                classes[value].add(label)
                images[label] += count
            alone = all(len(labels) == 1 for labels in classes.values())
            if alone and len(images) > 1 and min(images.values()) >= _FEW:
                yield (
                    f"the {name} of an image's file gives its class away: each {name} belongs to "
                    "one class, so the model may learn traces of it instead of what is shown"
                )

    def brief(self, text: str) -> str:
        """Return what a record is without its pixels."""
        stored = json.loads(text)
        return f"{stored['size']} pixels, mode {stored['mode']}"

    def picture(self, values: Mapping[str, Any]) -> str:
        """Return a row's image as the address of a PNG that holds it."""
        images = self.data.images
        pixels = np.frombuffer(values[PIXELS], np.uint8)
        shape = (images.size, images.size, images.channels)
        content = io.BytesIO()
        Image.fromarray(pixels.reshape(shape).squeeze()).save(content, "PNG")
        return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"


@dataclass(frozen=True)
class ReadImage:
    """An image as a model reads it.

    pixels: as (height, width, channels).
    facts: `size` and `mode` of its file.
    identity: the same exactly for equal pixels before they are resized.
    """

    pixels: bytes
    facts: Mapping[str, str]
    identity: str


def read_image(column: str, content: Any, settings: ImagesConfig) -> ReadImage | None:
    """Return the image in a column; None if there is none.

    Raises:
        Defect: it is something else, or broken.
    """
    if isinstance(content, Mapping):
        # The library `datasets` stores images like this.
        content = content.get("bytes")
    if content is None:
        return None
    if not isinstance(content, bytes):
        raise Defect("wrong_type", f"{column} is {str(content)[:80]!r}, not an image")
    try:
        image, mode = decoded(content, settings.max_pixels)
        how = settings.size, settings.color, settings.resize, settings.interpolation
        pixels = prepared(image, *how)
    except Unreadable as error:
        raise Defect("huge_image" if error.huge else "broken_image", str(error)) from error
    shape = f"{image.width} x {image.height}"
    # A gray image is the same, whether its file has one channel or three.
    digest = hashlib.sha256(image.convert("RGB").tobytes()).hexdigest()
    return ReadImage(pixels.tobytes(), {"size": shape, "mode": mode}, f"{shape} {digest}")


def _values(record: Content) -> dict[str, Any]:
    return {**json.loads(record.text), PIXELS: record.attachment}


def scale_of(data: DataRecord) -> tuple[list[float], list[float]]:
    """Return the mean and deviation of each channel on the training side."""
    path: Path = data.path(COLUMNS)
    images = Images.model_validate_json(path.read_text(encoding="utf-8"))
    return images.mean, images.deviation


def _totals(counts: Counter[tuple[str, int]]) -> dict[str, int]:
    totals = Counter[str]()
    for (value, _), count in counts.items():
        totals[value] += count
    return dict(sorted(totals.items(), key=lambda item: (-item[1], item[0])))


def _listed(counts: Mapping[str, int]) -> str:
    shown = [f"{readable(name)} ({count:,})" for name, count in [*counts.items()][:_SHOWN]]
    more = len(counts) - len(shown)
    return ", ".join([*shown, *([f"and {more:,} others"] if more else [])])

"""Read records with texts, images and other columns. Nothing here imports torch."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from steadytrain.components.images.encoder import (
    PIXELS,
    SUFFIXES,
    ImageEncoder,
    Images,
    read_image,
)
from steadytrain.components.shared.config import DataConfig
from steadytrain.components.shared.errors import BadInput, DataError
from steadytrain.components.shared.records import DataRecord, Side
from steadytrain.components.tabular.columns import Column, Table, Target, inferred
from steadytrain.components.tabular.encoder import (
    FEATURES,
    check_given,
    parsed,
    plain_value,
    with_unread,
)
from steadytrain.components.tabular.model import is_missing, text_of
from steadytrain.components.tasks.encoding.base import (
    COLUMNS,
    Content,
    Fitted,
    TokenizerSettings,
)
from steadytrain.components.tasks.encoding.fields import Defect, class_of
from steadytrain.components.tasks.encoding.labeled_text import (
    ClassIndex,
    LabeledRows,
    trained_indices,
)

IMAGES: Final = "image_columns"
"""Column of rows and of test records: which columns of the record hold its images (`joined`). Their
pixels follow each other in this order."""
_BETWEEN: Final = "\x1f"
_WORDS: Final = 4
"""Words from which a value counts as text before the kinds of the columns are known."""


class Schema(BaseModel):
    """What the columns are.

    pictures: the columns with images.
    images: what the images of the training side have in common, of all columns together.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    table: Table
    pictures: list[str] = []
    images: Images | None = None

    @property
    def texts(self) -> list[str]:
        """The columns of text."""
        return [name for name, kind in self.table.features.items() if kind == "text"]

    @property
    def others(self) -> dict[str, str]:
        """The kinds of the columns that are neither text nor image."""
        kinds = self.table.features.items()
        return {name: kind for name, kind in kinds if kind not in ("text", "image")}

    def remarks(self) -> Iterator[str]:
        yield from self.table.remarks()
        yield from self.images.remarks() if self.images else ()

    def card(self) -> dict[str, Any]:
        """Return the fields of the data card."""
        return self.table.card() | (self.images.card() if self.images else {})


def read_schema(data: DataRecord) -> Schema:
    """Return the columns of prepared data."""
    path: Path = data.path(COLUMNS)
    return Schema.model_validate_json(path.read_text(encoding="utf-8"))


def joined(columns: Iterable[str]) -> str:
    """Return the names of columns as one text."""
    return _BETWEEN.join(columns)


def parted(columns: str) -> list[str]:
    """Return the names in what `joined` returned."""
    return columns.split(_BETWEEN) if columns else []


def pixels_by_column(columns: str, stored: bytes) -> dict[str, bytes]:
    """Return the pixels of a record's images by column.

    Args:
        columns: see `IMAGES`.
        stored: the pixels of all of them.
    """
    names = parted(columns)
    size = len(stored) // max(1, len(names))
    return {name: stored[place * size :][:size] for place, name in enumerate(names)}


@dataclass(frozen=True)
class MultimodalEncoder:
    """Records with a class, whose other columns are texts, images, numbers, categories and dates.

    Which columns are text is known when all are read, so rows hold the values, and the training
    part turns them into tokens.
    """

    data: DataConfig

    packed = False
    labeled = True

    @property
    def attached(self) -> tuple[Sequence[str], frozenset[str]]:
        return self.data.columns.images, SUFFIXES

    @property
    def schema(self) -> pa.Schema:
        types: dict[str, pa.DataType] = dict.fromkeys(
            (FEATURES, IMAGES, "size", "mode"), pa.string()
        )
        return pa.schema({**types, PIXELS: pa.binary(), "label": pa.int32()})

    @property
    def tokenizer(self) -> TokenizerSettings:
        return TokenizerSettings(self.texts_in, adds_ends=True, compared=self.compared)

    @cached_property
    def target(self) -> str:
        if not self.data.targets:
            raise BadInput(
                f"data.target is missing: data.task {self.data.task} predicts a column",
                remedy="name the column to predict, such as --set data.target=kind",
            )
        return self.data.targets[0]

    def columns(self) -> Sequence[Sequence[str]]:
        named = self.target, *self.data.features, *self.data.columns.images
        return [[*dict.fromkeys(named)]]

    def read(self, row: Mapping[str, Any]) -> Content:
        check_given(row, self.target, self.data.labels)
        label, columns = class_of(row, self.target, self.data.labels), self.data.columns
        others = self.target, columns.group, columns.slice
        names = self.data.features or [name for name in row if name not in others]
        chosen = columns.images
        values, images = dict[str, Any](), dict[str, Any]()
        for name in dict.fromkeys([*names, *chosen]):
            value = row.get(name)
            if name in chosen or isinstance(value, bytes) or _is_stored_image(value):
                images[name] = None if is_missing(value) else value
            elif not chosen and _names_image(value):
                raise Defect(
                    "missing_file",
                    f"{name} is {str(value)[:80]!r}, and there is no such file; if it is a text, "
                    "name the column of images in data.columns.image",
                )
            else:
                values[name] = plain_value(name, value)
        if chosen and (unread := sorted(images.keys() - {*chosen})):
            raise Defect(
                "wrong_type",
                f"{unread[0][:80]} holds an image, and data.columns.image names "
                f"{', '.join(chosen)[:200]}: list it there, too, or name the other columns in "
                "data.features",
            )
        read = {
            name: image
            for name, value in sorted(images.items())
            if (image := read_image(name, value, self.data.images))
        }
        digests = [
            f"{name} {hashlib.sha256(image.identity.encode()).hexdigest()}"
            for name, image in read.items()
        ]
        content = {"record": values, "image": _BETWEEN.join(digests)}
        facts = {
            name: _BETWEEN.join(image.facts[name] for image in read.values())
            for name in ("size", "mode")
        }
        pixels = b"".join(image.pixels for image in read.values())
        text = _written({**content, **facts, "columns": joined(read)})
        return Content(text, label, identity=_written(content), attachment=pixels)

    def texts_in(self, text: str) -> list[str]:
        """Return the values of a record that are text, as far as that is known."""
        record: Mapping[str, Any] = json.loads(text)["record"]
        return [value for name, value in record.items() if self._is_text(name, value)]

    def compared(self, text: str) -> Sequence[str]:
        """Return a digest of what must be equal in near duplicates, and the texts."""
        content = json.loads(text)
        record = content["record"].items()
        equal = {name: value for name, value in record if not self._is_text(name, value)}
        digest = hashlib.sha256(_written([equal, content["image"]]).encode()).hexdigest()
        return digest, " ".join(self.texts_in(text))

    def _is_text(self, name: str, value: Any) -> bool:
        named = name == self.data.columns.text
        return isinstance(value, str) and (named or len(value.split()) >= _WORDS)

    def brief(self, text: str) -> str:
        """Return what a record is without its pixels."""
        stored = json.loads(text)
        facts = zip(parted(stored["size"]), parted(stored["mode"]), strict=True)
        images = [f"{size} pixels, mode {mode}" for size, mode in facts]
        return f"{_written(stored['record'])} and {' and '.join(images) or 'no image'}"

    def test_columns(self, records: pa.Table) -> Mapping[str, Any]:
        texts: list[Any] = records["content"].to_pylist()
        column = [json.loads(text) for text in texts]
        return {
            FEATURES: pa.array([_written(one["record"]) for one in column], pa.string()),
            IMAGES: pa.array([one["columns"] for one in column], pa.string()),
            PIXELS: records["attachment"].cast(pa.binary()),
            "label": records["label"],
        }

    def row_encoder(self, fitted: Fitted) -> LabeledRows:
        return LabeledRows(ClassIndex(trained_indices(fitted)), _values)

    def describe(self, sides: Mapping[Side, Iterable[pa.Table]]) -> Schema:
        """Return what the columns of the training side are.

        Raises:
            DataError: only one kind of data is there to learn from.
        """
        records, labels = list[Mapping[str, Any]](), list[Any]()
        places = Counter[str]()

        def with_images() -> Iterator[pa.Table]:
            for table in sides["train"]:
                records.extend(parsed(table))
                labels.extend(table["label"].to_pylist())
                images = [*_images_of(table)]
                places.update(image.pop("column") for image in images)
                yield pa.Table.from_pylist(images, ImageEncoder(self.data).schema)

        images = ImageEncoder(self.data).describe({"train": with_images()})
        pictures = sorted(places)
        table = self._table(records, labels, pictures)
        columns = [
            Column(
                name=name,
                kind="image",
                missing=round(1 - places[name] / len(records), 6),
                distinct=places[name],
            )
            for name in pictures
        ]
        table = table.model_copy(
            update={"columns": sorted([*table.columns, *columns], key=lambda one: one.name)}
        )
        schema = Schema(
            table=with_unread(table, sides),
            pictures=pictures,
            images=images if pictures else None,
        )
        self._check(schema)
        return schema

    def cut(self, schema: Schema, tables: Iterable[pa.Table], tokenizer: Any) -> int:
        """Return how many rows have texts of more than `data.sequence_length` tokens."""
        if not schema.texts:
            return 0
        texts = ([text_of(record, schema.texts) for record in parsed(rows)] for rows in tables)
        tokens = (tokenizer(some, verbose=False)["input_ids"] for some in texts if some)
        return sum(len(row) > self.data.sequence_length for row in chain.from_iterable(tokens))

    def _table(
        self, records: Sequence[Mapping[str, Any]], labels: Sequence[Any], pictures: Sequence[str]
    ) -> Table:
        """Return what the columns without images are."""
        names = {name: None for record in records for name in record}
        for image in pictures:
            # Where the image is missing, its column is among the others.
            names.pop(image, None)
            stray = [record[image] for record in records if not is_missing(record.get(image))]
            if stray:
                raise DataError(
                    f"the column {image!r} has images, and {len(stray):,} other values, such as "
                    f"{str(stray[0])[:80]!r}",
                    remedy="correct them, or set data.columns.image to "
                    f"[{', '.join(pictures)}], so that these records are quarantined",
                )
        columns = {name: [record.get(name) for record in records] for name in names}
        target = Target(self.target, [np.array(labels)], numbers=False)
        allowed, categories = self.data.allow_leaks, self.data.categories
        text = self.data.columns.text
        return inferred(columns, target, allowed=allowed, categories=categories, text=text)

    def _check(self, schema: Schema) -> None:
        kinds = {
            "a text": schema.texts,
            "an image": schema.pictures,
            "a number, category or date": schema.others,
        }
        there = [name for name, columns in kinds.items() if columns]
        if len(there) > 1:
            return
        others = [name for name in kinds if name not in there]
        raise DataError(
            f"no column is {others[0]}, and none is {others[1]}: "
            + ("; ".join(schema.remarks()) or "there is one kind of data"),
            remedy="learn from one kind with data.task sequence_classification (texts), "
            "image_classification or tabular_classification, or name the columns in "
            "data.columns.text and data.columns.image",
        )


def _values(content: Content) -> dict[str, Any]:
    text = json.loads(content.text)
    return {
        FEATURES: _written(text["record"]),
        PIXELS: content.attachment,
        IMAGES: text["columns"],
        "size": text["size"],
        "mode": text["mode"],
    }


def _names_image(value: Any) -> bool:
    return isinstance(value, str) and value.strip().lower().endswith(tuple(SUFFIXES))


def _images_of(table: pa.Table) -> Iterator[dict[str, Any]]:
    """Yield the images of rows: their column, and what `ImageEncoder.describe` reads."""
    for row in table.select([IMAGES, PIXELS, "label", "size", "mode"]).to_pylist():
        parts = pixels_by_column(row[IMAGES], row[PIXELS])
        facts = zip(parted(row["size"]), parted(row["mode"]), strict=True)
        for (column, pixels), (size, mode) in zip(parts.items(), facts, strict=True):
            columns = {PIXELS: pixels, "label": row["label"], "size": size, "mode": mode}
            yield {"column": column, **columns}


def _is_stored_image(value: Any) -> bool:
    """Return whether a value is an image as the library `datasets` stores it."""
    return isinstance(value, Mapping) and isinstance(value.get("bytes"), bytes)


def _written(content: Any) -> str:
    return json.dumps(content, sort_keys=True, ensure_ascii=False)

"""Read records with texts, an image and other columns. Nothing here imports torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
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
from steadytrain.components.tabular.encoder import FEATURES, parsed, plain_value
from steadytrain.components.tabular.model import is_missing
from steadytrain.components.tasks.encoding.base import (
    COLUMNS,
    Content,
    EncodedRecord,
    EncodedRow,
    Fitted,
    TokenizerSettings,
)
from steadytrain.components.tasks.encoding.fields import Defect, class_of
from steadytrain.components.tasks.encoding.labeled_text import ClassIndex, trained_indices

IMAGE: Final = "image_column"
"""Column of rows: which column of the record holds its image; "" if it has none."""
_WORDS: Final = 4
"""Words from which a value counts as text before the kinds of the columns are known."""


class Schema(BaseModel):
    """What the columns are.

    image: the column with images; None if there is none.
    images: what the images of the training side have in common.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    table: Table
    image: str | None = None
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


@dataclass(frozen=True)
class MultimodalEncoder:
    """Records with a class, whose other columns are texts, images, numbers, categories and dates.

    A record has at most one image. Which columns are text is known when all are read, so rows hold
    the values, and the training part turns them into tokens.
    """

    data: DataConfig

    packed = False
    labeled = True

    @property
    def attached(self) -> tuple[str, frozenset[str]]:
        return self.data.columns.image or "", SUFFIXES

    @property
    def schema(self) -> pa.Schema:
        types: dict[str, pa.DataType] = dict.fromkeys(
            (FEATURES, IMAGE, "size", "mode"), pa.string()
        )
        return pa.schema({**types, PIXELS: pa.binary(), "label": pa.int32()})

    @property
    def tokenizer(self) -> TokenizerSettings:
        return TokenizerSettings(self.texts_in, adds_ends=True, compared=self.compared)

    @cached_property
    def target(self) -> str:
        if self.data.target is None:
            raise BadInput(
                f"data.target is missing: data.task {self.data.task} predicts a column",
                remedy="name the column to predict, such as --set data.target=kind",
            )
        return self.data.target

    def columns(self) -> Sequence[Sequence[str]]:
        image = self.data.columns.image
        return [[*dict.fromkeys([self.target, *self.data.features, *([image] if image else [])])]]

    def read(self, row: Mapping[str, Any]) -> Content:
        label, columns = class_of(row, self.target, self.data.labels), self.data.columns
        others = self.target, columns.group, columns.slice
        names = self.data.features or [name for name in row if name not in others]
        chosen = [columns.image] if columns.image else []
        values, images = dict[str, Any](), dict[str, Any]()
        for name in dict.fromkeys([*names, *chosen]):
            value = row.get(name)
            if name in chosen or isinstance(value, bytes) or _is_stored_image(value):
                images[name] = value
            elif isinstance(value, str) and value.strip().lower().endswith(tuple(SUFFIXES)):
                raise Defect("missing_file", f"{name} is {value[:80]!r}, and there is no such file")
            else:
                values[name] = plain_value(name, value)
        if len(images) > 1:
            raise Defect(
                "wrong_type",
                f"{' and '.join(sorted(images))[:80]} both hold images: name one in "
                "data.columns.image, and the other columns in data.features",
            )
        column, found = "", None
        for name, value in images.items():
            found = read_image(name, value, self.data.images)
            column = name if found else ""
        facts = found.facts if found else {"size": "", "mode": ""}
        content = {
            "record": values,
            "image": f"{column} {hashlib.sha256(found.identity.encode()).hexdigest()}"
            if found
            else "",
        }
        identity = _written(content)
        text = _written({**content, **facts})
        pixels = found.pixels if found else b""
        return Content(text, label, identity=identity, attachment=pixels)

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
        found = json.loads(text)
        image = f"{found['size']} pixels, mode {found['mode']}" if found["image"] else "no image"
        return f"{_written(found['record'])} and {image}"

    def test_columns(self, records: pa.Table) -> Mapping[str, Any]:
        texts: list[Any] = records["content"].to_pylist()
        found = [json.loads(text) for text in texts]
        return {
            FEATURES: pa.array([_written(one["record"]) for one in found], pa.string()),
            PIXELS: records["attachment"].cast(pa.binary()),
            "label": records["label"],
        }

    def row_encoder(self, fitted: Fitted) -> MultimodalRows:
        return MultimodalRows(ClassIndex(trained_indices(fitted)))

    def describe(self, sides: Mapping[Side, Iterable[pa.Table]]) -> Schema:
        """Return what the columns of the training side are.

        Raises:
            DataError: images are in several columns, or only one kind of data is there to learn
                from.
        """
        records, labels = list[Mapping[str, Any]](), list[Any]()
        places = dict[str, int]()

        def with_images() -> Iterator[pa.Table]:
            for table in sides["train"]:
                records.extend(parsed(table))
                labels.extend(table["label"].to_pylist())
                for name in table[IMAGE].to_pylist():
                    places[str(name)] = places.get(str(name), 0) + 1
                there: Any = pc.not_equal(table[IMAGE], pa.scalar(""))
                yield table.filter(there)

        images = ImageEncoder(self.data).describe({"train": with_images()})
        missing = places.pop("", 0)
        if len(places) > 1:
            raise DataError(
                f"images are in the columns {', '.join(sorted(places))[:200]}",
                remedy="put them into one column, or name it in data.columns.image",
            )
        image = next(iter(places), None)
        table = self._table(records, labels, image)
        if image:
            found = Column(
                name=image,
                kind="image",
                missing=round(missing / len(records), 6),
                distinct=len(records) - missing,
            )
            table = table.model_copy(
                update={"columns": sorted([*table.columns, found], key=lambda one: one.name)}
            )
        unread = [
            remark
            for side in ("validation", "test")
            for remark in table.unread([*chain.from_iterable(map(parsed, sides[side]))], side)
        ]
        schema = Schema(
            table=table.model_copy(update={"unread_elsewhere": unread}),
            image=image,
            images=images if image else None,
        )
        self._check(schema)
        return schema

    def _table(
        self, records: Sequence[Mapping[str, Any]], labels: Sequence[Any], image: str | None
    ) -> Table:
        """Return what the columns without images are."""
        names = {name: None for record in records for name in record}
        # Where the image is missing, its column is among the others.
        names.pop(image or "", None)
        stray = [record[image] for record in records if image and not is_missing(record.get(image))]
        if stray:
            raise DataError(
                f"the column {image!r} has images, and {len(stray):,} other values, such as "
                f"{str(stray[0])[:80]!r}",
                remedy=f"set data.columns.image to {image}, so that these records are quarantined",
            )
        if unknown := sorted({*self.data.allow_leaks} - names.keys()):
            raise DataError(
                f"data.allow_leaks names {unknown[0]!r}, and the data have no such column",
                remedy=f"leave it out; the columns are {', '.join(sorted(names))[:500]}",
            )
        columns = {name: [record.get(name) for record in records] for name in names}
        target = Target(self.target, [np.array(labels)], numbers=False)
        allowed, text = self.data.allow_leaks, self.data.columns.text
        return inferred(columns, target, allowed=allowed, text=text)

    def _check(self, schema: Schema) -> None:
        kinds = {
            "a text": schema.texts,
            "an image": schema.image,
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


@dataclass(frozen=True)
class MultimodalRows:
    """Encodes records."""

    target_of: ClassIndex

    def encode(self, records: Sequence[Content]) -> list[EncodedRecord | Defect]:
        return [self._encoded(record) for record in records]

    def _encoded(self, record: Content) -> EncodedRecord | Defect:
        target = self.target_of(record)
        if isinstance(target, Defect):
            return target
        found = json.loads(record.text)
        values = {
            FEATURES: _written(found["record"]),
            PIXELS: record.attachment,
            IMAGE: found["image"].rpartition(" ")[0],
            "size": found["size"],
            "mode": found["mode"],
            "label": target,
        }
        return EncodedRecord(1, [EncodedRow(values, tokens=1, targets=1)])


def _is_stored_image(value: Any) -> bool:
    """Return whether a value is an image as the library `datasets` stores it."""
    return isinstance(value, Mapping) and isinstance(value.get("bytes"), bytes)


def _written(content: Any) -> str:
    return json.dumps(content, sort_keys=True, ensure_ascii=False)

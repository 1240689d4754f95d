"""Encode texts or pairs of texts with the labels of each, one row each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from steadytrain.components.tasks.encoding.base import Content, Fitted
from steadytrain.components.tasks.encoding.fields import Defect, labels_of
from steadytrain.components.tasks.encoding.labeled_text import Target, TargetedTextEncoder

_REPEATED: Final = "name a label twice, which counts once"


class MultiLabelEncoder(TargetedTextEncoder):
    """Records with a text, or two, and a set of labels. A row has the index of each of them."""

    labeled = True
    target = pa.list_(pa.int32())

    def read(self, row: Mapping[str, Any]) -> Content:
        content = super().read(row)
        labels = self.classes_in(str(content.label))
        once = sorted({*labels})
        if len(once) == len(labels):
            return content
        return replace(content, label=_written(once), noticed=_REPEATED)

    def label_of(self, row: Mapping[str, Any]) -> str:
        data = self.data
        found = labels_of(row, data.columns.label, data.labels, data.label_separator)
        return _written(sorted(found))

    def classes_in(self, label: str) -> Sequence[str]:
        found: list[str] = json.loads(label)
        return found

    def target_of(self, fitted: Fitted) -> Target:
        indices = {label: index for index, label in enumerate(fitted.labels)}
        return LabelIndices({label: indices[label] for label in indices if label in fitted.trained})

    def test_columns(self, records: pa.Table) -> Mapping[str, Any]:
        labels: list[Any] = records["label"].to_pylist()
        sets = [self.classes_in(label) for label in labels]
        return {**super().test_columns(records), "label": pa.array(sets, pa.list_(pa.string()))}


@dataclass(frozen=True)
class LabelIndices:
    """Returns the indices of a record's labels, in ascending order.

    indices: of the labels on the training side.
    """

    indices: Mapping[str, int]

    def __call__(self, record: Content) -> NDArray[np.int32] | Defect:
        labels: list[str] = json.loads(str(record.label))
        for label in labels:
            if label not in self.indices:
                return Defect("label_unseen_in_training", f"one label is {label[:80]!r}")
        return np.array(sorted(self.indices[label] for label in labels), np.int32)


def _written(labels: Sequence[str]) -> str:
    return json.dumps(labels, ensure_ascii=False)

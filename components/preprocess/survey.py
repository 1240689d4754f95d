"""The records before they are encoded: read, checked, and without duplicates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from steadytrain.components.preprocess.duplicates import KEPT, Findings, find_duplicates
from steadytrain.components.preprocess.inputs import Inputs
from steadytrain.components.preprocess.labels import alike_labels
from steadytrain.components.preprocess.parallel import Workers
from steadytrain.components.preprocess.quarantine import Quarantine
from steadytrain.components.preprocess.reading import Reading, read_everything
from steadytrain.components.preprocess.signatures import PERMUTATIONS, band_rows
from steadytrain.components.preprocess.split import SIDES
from steadytrain.components.preprocess.spool import Spool
from steadytrain.components.shared.config import DataConfig, RunConfig
from steadytrain.components.shared.errors import DataError
from steadytrain.components.shared.parts import label_in, part_of
from steadytrain.components.shared.records import Side
from steadytrain.components.tasks.checks import check_class_weights
from steadytrain.components.tasks.encoding.base import Encoder

Progress = Callable[[str, float, float | None, str], None]
"""Takes the work, how much is done, the total (None if unknown), and the unit."""


@dataclass(frozen=True)
class Survey:
    """What is known about the records.

    trained: the labels that occur on the training side, sorted.
    labels: the classes in their order.
    """

    reading: Reading
    findings: Findings
    trained: list[str]
    labels: list[str]


def survey(
    config: RunConfig,
    encoder: Encoder,
    inputs: Inputs,
    *,
    spool: Spool,
    quarantine: Quarantine,
    scratch: Path,
    workers: Workers,
    progress: Progress,
    warn: Callable[[str], None],
) -> Survey:
    """Read all records, and put the good ones on the spool with what duplicates them.

    Raises:
        DataError: the data cannot be used.
        BadInput: the weights of classes are not those of the labels.
    """
    data = config.data
    reading = read_everything(
        inputs,
        data,
        encoder,
        config.training.curriculum.column,
        spool=spool,
        quarantine=quarantine,
        scratch=scratch,
        workers=workers,
        progress=lambda done: (
            progress("reading", spool.count, None, "records")
            if inputs.bytes is None
            else progress("reading", min(done, inputs.bytes), inputs.bytes, "bytes")
        ),
    )
    threshold = data.near_duplicate_threshold if encoder.tokenizer else None
    findings = find_duplicates(
        spool,
        threshold=threshold,
        bands=0 if threshold is None else PERMUTATIONS // band_rows(threshold),
        conflicts=encoder.labeled,
        progress=lambda done, total: progress("finding duplicates", done, total, "bands"),
    )
    findings.save(spool.folder)
    trained = _trained_labels(data, spool, reading, findings) if encoder.labeled else []
    labels = _labels(data, trained)
    check_class_weights(config.training.class_weights, labels)
    if encoder.labeled:
        _warn_of_labels(reading, labels, trained, warn)
    return Survey(reading, findings, trained, labels)


def check_sides(documents: Mapping[Side, int]) -> None:
    """Check that no side of the split is empty.

    Raises:
        DataError: one is.
    """
    for side, count in documents.items():
        if not count:
            raise DataError(
                f"the {side} side of the split is empty: there are {sum(documents.values())} "
                "usable records",
                remedy="give more data, raise data.validation_share or data.test_share, "
                "or set another data.split_salt; with data.columns.group there must be "
                "many groups",
            )


def _trained_labels(
    data: DataConfig, spool: Spool, reading: Reading, findings: Findings
) -> list[str]:
    training = spool.array("sides") == SIDES.index("train")
    seen = np.unique(spool.array("labels")[training & (findings.codes == KEPT)])
    trained = sorted(reading.labels[int(label)] for label in seen)
    for name in data.by_part():
        mine = [label for label in trained if not name or part_of(label) == name]
        where, of = (f"parts.{name}.", f" of the part {name!r}") if name else ("", "")
        if len(mine) < 2:
            raise DataError(
                f"the training side{of} has {len(mine)} different labels ({', '.join(mine)}), "
                "and at least two are needed; "
                f"{(findings.codes != KEPT).sum():,} of all records are left out "
                "as duplicates, or because equal texts have different labels",
                remedy=f"give data with more classes, or check data.{where}columns.label",
            )
    return trained


def _labels(data: DataConfig, trained: list[str]) -> list[str]:
    """Return the classes in their order: the configured labels, or those that are trained."""
    if not data.parts:
        return data.labels or trained
    labels = list[str]()
    for name, part in sorted(data.parts.items()):
        given = [label_in(name, label) for label in part.labels or ()]
        labels += given or [label for label in trained if part_of(label) == name]
    return labels


def _warn_of_labels(
    reading: Reading, labels: list[str], trained: list[str], warn: Callable[[str], None]
) -> None:
    for alike in alike_labels(reading.labels.values()):
        warn(
            f"the labels {', '.join(map(repr, alike))} are separate classes, although they "
            "differ only in case, spaces or Unicode form"
        )
    absent = sorted(set(labels) - set(trained))
    if absent:
        warn(f"no training record has the label {', '.join(absent)}")

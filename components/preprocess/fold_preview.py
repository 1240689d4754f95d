"""The folds of a data set, without preparing it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from steadytrain.components.preprocess.duplicates import KEPT
from steadytrain.components.preprocess.folds import Division
from steadytrain.components.preprocess.inputs import find_inputs
from steadytrain.components.preprocess.parallel import workers, worth_starting
from steadytrain.components.preprocess.prepare import training_records
from steadytrain.components.preprocess.quarantine import Quarantine
from steadytrain.components.preprocess.split import SIDES
from steadytrain.components.preprocess.spool import Spool
from steadytrain.components.preprocess.survey import check_sides, set_aside, survey
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput, DataError
from steadytrain.components.shared.quantities import size
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.tasks.encoding.base import Encoder, class_reader, has_label_sets
from steadytrain.components.tasks.registry import open_encoder

_MOST: Final = 256_000_000
"""Bytes of data that are read for that."""


@dataclass(frozen=True)
class Preview:
    """The folds as they are before records are encoded, which may leave some out.

    sizes: records of each fold.
    """

    sizes: tuple[int, ...]
    warnings: tuple[str, ...]


def preview_folds(config: RunConfig) -> Preview:
    """Divide the training side as the preprocess step does. Nothing is kept.

    Args:
        config: of a run that holds out a fold.

    Raises:
        DataError: the step would reject the data.
        BadInput, StorageError: they cannot be read here, or are too large for that.
    """
    encoder = open_encoder(config.data)
    inputs = find_inputs(config.data, Workspace.of(config).output)
    stored = inputs.stored_bytes
    if stored is None or stored > _MOST:
        raise BadInput(
            "the data are not on this machine"
            if stored is None
            else f"the data have {size(stored)}, and at most {size(_MOST)} are read"
        )
    warnings = list[str]()
    with tempfile.TemporaryDirectory() as name, workers(worth_starting(stored)) as pool:
        scratch = Path(name)
        quarantine = Quarantine(scratch / "quarantine.jsonl")
        spool = Spool(scratch / "spool", inputs.bytes)
        try:
            found = survey(
                config,
                encoder,
                inputs,
                spool=spool,
                quarantine=quarantine,
                scratch=scratch,
                workers=pool,
                progress=lambda *_: None,
                warn=warnings.append,
            )
        except DataError as error:
            if quarantine.defects:
                error.remedy += "; a real run keeps that file"
            raise
        finally:
            spool.close()
            quarantine.close()
        kept = found.findings.sides[found.findings.codes == KEPT]
        counts = np.bincount(kept, minlength=len(SIDES)).tolist()
        documents = dict(zip(SIDES, counts, strict=True))
        counted = {**quarantine.counts, **set_aside(found.findings)}
        check_sides(documents, config.data, counted, found.given)
        division = Division.of(
            _records(spool, encoder),
            config.cross_validation.folds,
            config.data.split_salt,
            labeled=encoder.labeled,
        )
    if division.warning:
        warnings.append(division.warning)
    if defects := quarantine.warning(found.reading.records):
        warnings.append(defects)
    return Preview(tuple(division.sizes), tuple(warnings))


def _records(spool: Spool, encoder: Encoder) -> Iterator[pa.Table]:
    for part in spool.written():
        table = training_records(part, spool.folder).select(["id", "group", "label"])
        if has_label_sets(encoder):
            labels: list[Any] = table["label"].to_pylist()
            sets = [*map(class_reader(encoder), labels)]
            table = table.set_column(2, "label", pa.array(sets, pa.list_(pa.string())))
        ids: list[Any] = table["id"].to_pylist()
        yield table.set_column(0, "id", pa.array([one.hex() for one in ids], pa.string()))

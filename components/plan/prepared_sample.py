"""Prepared data for a plan of images, mixed records and series: the run's own, or of a few files.

Only prepared data determine such a model, its memory and its time. The run's own may not exist yet,
so the preparation itself runs on what is on this machine, in a folder that is removed again.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from steadytrain.components.preprocess.build import build
from steadytrain.components.preprocess.inputs import Inputs, inputs_of
from steadytrain.components.preprocess.model import find_model, with_template
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.quantities import size
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.shared.stage import Stage
from steadytrain.components.shared.stopping import Stopping
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.sizing.length import prepared
from steadytrain.components.tasks.base import open_encoder

_MOST: Final = 128 << 20
"""Bytes that are prepared for a plan. Photos of this size take about ten seconds."""

_FEWEST: Final = 200
"""Files that represent all; fewer may lack a class."""


@dataclass(frozen=True)
class KnownData:
    """What a plan knows of the data.

    record: of prepared data, which may be a sample.
    scale: rows of the training side of all data, for each of the record's.
    source: where the number of rows comes from.
    """

    record: DataRecord
    scale: float = 1.0
    source: str = "the prepared data"

    @property
    def rows(self) -> int:
        """For the training side of all data."""
        return max(1, round(self.record.sides["train"].rows * self.scale))


@contextmanager
def known_data(config: RunConfig, data_bytes: int | None = None) -> Iterator[KnownData]:
    """Yield prepared data to plan with: the run's own, else of files on this machine.

    Args:
        data_bytes: of all data, if the files here are a sample of them.

    Raises:
        BadInput: the data are elsewhere or too large to be prepared for a plan.
        DataError: they cannot be used.
    """
    record = prepared(config)
    if record is not None and data_bytes is None:
        yield KnownData(record)
        return
    inputs = inputs_of(config)
    stored = _stored(config, inputs)
    few = _few(config, inputs, stored)
    whole = data_bytes or stored
    with tempfile.TemporaryDirectory() as scratch:
        record = _prepare(config, few, Path(scratch))
        scale = whole / _stored(config, few)
        source = "all records, prepared for this plan"
        if scale != 1:
            count = sum(side.documents for side in record.sides.values())
            source = (
                f"{count:,} records, prepared for this plan and scaled to {size(whole)} of data"
            )
        yield KnownData(record, scale, source)


def _stored(config: RunConfig, inputs: Inputs) -> int:
    stored = inputs.stored_bytes
    away = any(not isinstance(file.location, Path) for file, _ in inputs.files)
    if stored is None or away:
        raise _unplanned(config, "they are not on this machine")
    return stored


def _few(config: RunConfig, inputs: Inputs, stored: int) -> Inputs:
    """Return inputs that a plan can prepare: all, or evenly spaced files of a folder of images."""
    if stored <= _MOST:
        return inputs
    few = inputs.files[:: math.ceil(stored / _MOST)]
    if inputs.attached or inputs.datasets or inputs.parts or len(few) < _FEWEST:
        raise _unplanned(config, f"they take {size(stored)}, and a plan prepares {size(_MOST)}")
    return replace(inputs, files=few)


def _unplanned(config: RunConfig, why: str) -> BadInput:
    return BadInput(
        f"data.source = {config.data.source}: a plan for data.task {config.data.task} needs "
        f"prepared data, and cannot prepare these: {why}",
        remedy="run `steadytrain step preprocess FILE` first, or give a sample of at most "
        f"{size(_MOST)} on this machine (for `design`, with the size of all data as --data-gb)",
    )


def _prepare(config: RunConfig, inputs: Inputs, scratch: Path) -> DataRecord:
    """Prepare data in a scratch folder, as the preprocess step does it."""
    config = with_template(config)
    encoder = open_encoder(config.data)
    model = find_model(config) if encoder.tokenizer else None
    workspace = Workspace(scratch / "output", config.run_id)
    workspace.create()
    folder = scratch / "preprocess"
    folder.mkdir()
    with closing(workspace.stream("preprocess")) as stream:
        stage = Stage("preprocess", workspace, stream, Stopping())
        record = build(config, encoder, model, inputs, folder, stage)
    return record.model_copy(update={"folder": str(folder / "data")})

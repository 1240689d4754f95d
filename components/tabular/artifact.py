"""What an exported model of a table costs its users: time for a record, and size."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pyarrow as pa

from steadytrain.components.shared.artifact import Artifact, timed
from steadytrain.components.tabular.encoder import parsed
from steadytrain.components.tabular.model import load

_RECORDS: Final = 50


def measured(folder: Path, records: pa.Table) -> Artifact:
    """Measure an exported model.

    Args:
        records: of a held-out side; the first ones are predicted one by one.
    """
    model = load(folder)
    rows = parsed(records.slice(0, _RECORDS))
    return timed(folder, lambda row: model.outputs([row], strict=False), rows)

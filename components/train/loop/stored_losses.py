"""Each training row's loss under a reference model, in a file that later attempts and runs read.

The file is written whole or not at all, and its digest shows damage. A row that has no loss yet is
NaN, so that scoring continues where it was interrupted.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from steadytrain.components.shared.arrow_files import open_batches, write_batch
from steadytrain.components.shared.errors import DataError
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.storage.local import is_stored

Losses = npt.NDArray[np.float64]
_SCHEMA = pa.schema([("loss", pa.float64())])


class StoredLosses:
    """The file for one reference model and one set of rows.

    Args:
        key: digest of all that determines the losses.
        rows: number of rows.
    """

    def __init__(self, storage: LocalStorage, key: str, rows: int) -> None:
        self.storage, self.name, self.rows = storage, f"{key}.arrow", rows

    def read(self) -> tuple[Losses, str]:
        """Return the losses, and why those in the file cannot be used; "" if there is no damage.

        Raises:
            PathTaken: something else is in the place of the file.
        """
        missing = np.full(self.rows, np.nan)
        path = self.storage.folder / self.name
        if not is_stored(path):
            return missing, ""
        try:
            parts = [stored.checked().column("loss") for stored in open_batches(path)]
        except (DataError, KeyError) as error:
            return missing, str(error)
        none = np.empty(0, dtype=np.float64)
        found = np.concatenate([none, *(np.from_dlpack(part) for part in parts)])
        if len(found) != self.rows:
            return missing, f"{path} has {len(found)} rows instead of {self.rows}"
        return found, ""

    def write(self, losses: Losses) -> None:
        """Replace the file.

        Raises:
            StorageError: it cannot be written.
        """
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, _SCHEMA) as writer:
            write_batch(writer, pa.record_batch([pa.array(losses)], schema=_SCHEMA))
        self.storage.write(self.name, sink.getvalue().to_pybytes())

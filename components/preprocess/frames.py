"""Small tables as pandas reads them, for libraries that take such a frame."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from steadytrain.components.preprocess.sources import SourceFile, refused
from steadytrain.components.shared.redaction import redact


def read_frame(file: SourceFile, address: str, *, as_written: bool = False) -> Any:
    """Return a file as a frame of pandas.

    Args:
        address: what the user gave, for errors.
        as_written: texts stay texts, as in the records of any data: 007 is not 7.

    Raises:
        BadInput: it is no table, or cannot be read.
    """
    import pandas as pd

    texts: dict[str, Any] = {"dtype": str} if as_written else {}
    values: dict[str, Any] = {"dtype": False, "convert_dates": False} if as_written else {}
    readers = {
        ".csv": lambda path: pd.read_csv(path, **texts),
        ".tsv": lambda path: pd.read_csv(path, sep="\t", **texts),
        ".parquet": pd.read_parquet,
        ".json": lambda path: pd.read_json(path, **values),
        ".jsonl": lambda path: pd.read_json(path, lines=True, **values),
        ".ndjson": lambda path: pd.read_json(path, lines=True, **values),
    }
    read = readers.get(file.suffix.lower())
    if read is None:
        why = f"{file.name} is no table of {', '.join(readers)}"
        raise refused(address, why, "write it as one of these")
    with tempfile.TemporaryDirectory() as scratch, file.local(Path(scratch)) as path:
        try:
            return read(path)
        except (ValueError, TypeError, KeyError, OSError) as error:
            why = f"{file.name} cannot be read as a table: {redact(str(error))}"
            raise refused(address, why, "restore the file") from error

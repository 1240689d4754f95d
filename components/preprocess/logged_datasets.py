"""Data sets that runs have logged to MLflow: where they are, and whether they are still the same.

The address is mlflow-dataset:RUN_ID, or mlflow-dataset:RUN_ID/NAME if the run has several. What
MLflow stores is no copy of the data, only an address and a digest. So the content at the address is
read, and its digest is computed again as MLflow has computed it. A data set of which that is not
possible is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from steadytrain.components.preprocess.frames import read_frame
from steadytrain.components.preprocess.sources import SourceFile, find_files, refused
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.redaction import redact
from steadytrain.components.shared.tracking.connect import import_mlflow, tracking_errors
from steadytrain.components.shared.tracking.run import reading_client
from steadytrain.components.shared.tracking.store import sqlite_uri

PREFIX: Final = "mlflow-dataset:"
_STORE: Final = "mlflow.db"
_GIVE: Final = "give the address of the data themselves"


@dataclass(frozen=True)
class LoggedDataset:
    """A data set as an MLflow run has logged it.

    address: the one that names it.
    sources: the addresses of its data.
    digest: MLflow's, of the content.
    inputs: steadytrain's own digest of the files at `sources`; "" if another program logged it.
    """

    address: str
    sources: Sequence[str]
    digest: str
    inputs: str = ""

    def check(self, exclude: list[str]) -> None:
        """Compare the content with what MLflow's digest was computed from.

        Raises:
            BadInput: it is not the same any more, or it cannot be compared.
        """
        files = [file for source in self.sources for file in find_files(source, exclude)]
        if len(files) != 1:
            raise refused(self.address, f"its source has {len(files)} files", _GIVE)
        digest = _digest(self.address, files[0])
        if digest != self.digest:
            raise self.changed(digest)

    def changed(self, found: str) -> BadInput:
        """Return the error for another content."""
        return refused(
            self.address,
            f"the content of {', '.join(self.sources)} has the digest {found}, and the run logged "
            f"{self.inputs or self.digest}",
            f"restore the data, or {_GIVE}, if this content is meant",
        )


def logged_dataset(address: str, store: str | None, output: Path | None) -> LoggedDataset:
    """Return what an MLflow run has logged.

    Args:
        store: address of the tracking store; None means MLFLOW_TRACKING_URI, or the output folder.
        output: folder of the runs.

    Raises:
        BadInput: there is no such run or data set, or its source cannot be read.
        TrackingError: the store cannot be used.
    """
    uri = store or os.environ.get("MLFLOW_TRACKING_URI")
    if not uri and output is None:
        raise refused(address, "no tracking store is known", "set MLFLOW_TRACKING_URI")
    uri = uri or sqlite_uri(Path(str(output)) / _STORE)
    run_id, _, name = address.removeprefix(PREFIX).partition("/")
    client = reading_client(uri)
    with tracking_errors(uri):
        try:
            inputs = client.get_run(run_id).inputs.dataset_inputs
        except import_mlflow().exceptions.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            why = f"the store has no run {run_id}"
            raise refused(address, why, "name a run that is there") from error
    known = {(item.dataset.name, item.dataset.digest): item.dataset for item in inputs}
    chosen = [item for item in known.values() if name in ("", item.name)]
    if len(chosen) != 1:
        names = ", ".join(sorted({item.name for item in known.values()})) or "none"
        raise refused(
            address,
            f"{len(chosen)} data sets of run {run_id} have that name; it has {names}",
            f"give {PREFIX}{run_id}/NAME of one",
        )
    return _described(address, chosen[0])


def _described(address: str, dataset: Any) -> LoggedDataset:
    """Return where a data set is and what is known of its content."""
    source, profile = _content(dataset.source), _content(dataset.profile)
    match dataset.source_type:
        case "steadytrain":
            result = LoggedDataset(
                address,
                [str(each) for each in source.get("sources", [])],
                dataset.digest,
                str(profile.get("inputs_digest", "")),
            )
        case "local" | "s3":
            result = LoggedDataset(address, [str(source.get("uri", ""))], dataset.digest)
        case other:
            why = f"its source is of the type {other}, which steadytrain does not read"
            raise refused(address, why, _GIVE)
    if any(each.partition("/")[0] == address.partition("/")[0] for each in result.sources):
        raise refused(address, "its source is the run itself", _GIVE)
    if not result.inputs and not {"num_rows", "num_elements"} <= profile.keys():
        why = "its digest is not one of its content"
        raise refused(address, why, f"log it with mlflow.data.from_pandas, or {_GIVE}")
    return result


def _content(text: str | None) -> Mapping[str, Any]:
    try:
        content = json.loads(text or "{}")
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _digest(address: str, file: SourceFile) -> str:
    """Return MLflow's digest of a table."""
    from mlflow.data.digest_utils import compute_pandas_digest

    frame = read_frame(file, address)
    try:
        return str(compute_pandas_digest(frame))
    except (ValueError, TypeError, KeyError) as error:
        why = f"MLflow has no digest of {file.name}: {redact(str(error))}"
        raise refused(address, why, _GIVE) from error

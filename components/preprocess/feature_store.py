"""Tables of a Feast feature store: the features that each entity had at the time of its record.

Feast joins them to a table of entities. The result is a Parquet file that this process keeps until
its end, with a row for each row of that table, in its order. So equal features have equal digests.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from steadytrain.components.preprocess.frames import read_frame
from steadytrain.components.preprocess.parallel import IsolatedProcess
from steadytrain.components.preprocess.sources import find_files
from steadytrain.components.shared.errors import BadInput, SteadytrainError
from steadytrain.components.shared.feature_address import KIND, FeatureAddress
from steadytrain.components.shared.paths import local_path
from steadytrain.components.shared.processes import host_memory
from steadytrain.components.shared.redaction import redact

TIME: Final = "event_timestamp"
"""Feast's name for the time of an entity's row."""
_ROW: Final = "steadytrain_row"
"""Column that numbers the rows that Feast is given, since it returns them in any order."""


@functools.cache
def feature_table(address: str) -> Path:
    """Return a Parquet file with the table at an address. It is retrieved once in this process.

    Raises:
        BadInput: the store or the entities cannot be read, or Feast is not installed.
    """
    wanted = FeatureAddress.parse(address)
    folder = local_path(wanted.folder)
    if find_spec(KIND) is None:
        raise _refused(
            address,
            "Feast is not installed",
            "pip install 'steadytrain[feast]'; on a cluster, use an image for the steps with it",
        )
    if not (folder / "feature_store.yaml").is_file():
        why = f"{folder} has no feature_store.yaml"
        raise _refused(address, why, "give the folder of a Feast feature repository")
    result = _scratch() / "features.parquet"
    with IsolatedProcess(host_memory()) as isolated:
        for _ in isolated.iterate(address, _retrieve, address, wanted, folder, result):
            pass
    return result


def _scratch() -> Path:
    """Return a new folder that this process removes at its end, and no fork of it."""
    folder, owner = Path(tempfile.mkdtemp(prefix="steadytrain-features-")), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def _retrieve(address: str, wanted: FeatureAddress, folder: Path, result: Path) -> Iterator[None]:
    """Write the table. This runs in a process of its own, since Feast has threads and settings."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    os.environ.setdefault("FEAST_USAGE", "False")
    entities = _entities(address, wanted)
    table, features = entities.copy(), set[str]()
    try:
        from feast import FeatureStore

        store = FeatureStore(repo_path=str(folder))
        for part in _parts(address, store, wanted):
            if absent := [key for key in part.keys.values() if key not in entities.columns]:
                why = f"{part.view} joins by {absent[0]}, which {wanted.entities} has not"
                raise _refused(address, why, "add the column, or rename one")
            for name in part.features:
                if name in table.columns:
                    other = "of another view" if name in features else f"of {wanted.entities}"
                    why = f"the feature {name} of {part.view} and a column {other} have one name"
                    raise _refused(address, why, "rename one of them")
                features.add(name)
            for name, values in part.joined(store, entities).items():
                table[name] = values.to_numpy()
    except SteadytrainError:
        raise
    except Exception as error:
        # Feast raises errors of its own, of pandas, and of whatever its stores are made of.
        why = f"Feast cannot retrieve it ({type(error).__name__}: {redact(str(error))})"
        raise _refused(
            address, why, "fix the store, the names of its features, or the table of entities"
        ) from error
    if table[sorted(features)].isna().all(axis=None):
        raise _refused(
            address,
            f"none of the {len(table):,} rows of {wanted.entities} has a feature at its time",
            f"compare its keys and {TIME} with those of the store, and the time to live of the "
            "feature views",
        )
    content = pa.Table.from_pandas(table, preserve_index=False)
    pq.write_table(content.replace_schema_metadata(), result)
    yield


@dataclass(frozen=True)
class _Part:
    """The features of one view.

    keys: column of the entities by the join key of the view.
    """

    view: str
    features: Sequence[str]
    keys: Mapping[str, str]

    def joined(self, store: Any, entities: Any) -> Any:
        """Return a frame of the features, with a row for each entity's.

        Views are joined one by one, and each key and time once, with a number: of equal keys and
        times, Feast's file store keeps one, and where a feature of one view has expired, it drops
        the row with the features of all views.
        """
        columns = [*self.keys.values(), TIME]
        known = entities[columns].dropna().drop_duplicates()
        known = known.rename(columns={column: key for key, column in self.keys.items()})
        found = store.get_historical_features(
            entity_df=known.assign(**{_ROW: range(len(known))}),
            features=[f"{self.view}:{name}" for name in self.features],
        ).to_df()
        at = known.index[found[_ROW].astype(int)]
        first = entities.groupby(columns, dropna=False, sort=False)[TIME].transform(
            lambda same: same.index[0]
        )
        return found[list(self.features)].set_axis(at).reindex(first)


def _parts(address: str, store: Any, wanted: FeatureAddress) -> Iterator[_Part]:
    """Yield the features that an address names, by view."""
    from feast import FeatureView
    from feast.feature_view import DUMMY_ENTITY_ID

    asked = dict[str, tuple[list[str], Mapping[str, str]]]()
    if wanted.service:
        for view in store.get_feature_service(wanted.service).feature_view_projections:
            asked[view.name] = ([one.name for one in view.features], view.join_key_map)
    for feature in wanted.features:
        name, _, field = feature.rpartition(":")
        asked.setdefault(name, ([], {}))[0].append(field)
    views = {view.name: view for view in store.list_all_feature_views()}
    for name, (features, renamed) in asked.items():
        view = views.get(name)
        if view is not None and not isinstance(view, FeatureView):
            why = f"{name} is computed on demand, row by row"
            raise _refused(address, why, "leave it out, and compute it in the table of entities")
        if view is None or (unknown := sorted(set(features) - {one.name for one in view.features})):
            what = f"the view {name}" if view is None else f"a feature {unknown[0]} in {name}"
            raise _refused(address, f"the store has not {what}", "name one that it has")
        keys = [key for key in view.join_keys if key != DUMMY_ENTITY_ID]
        yield _Part(name, features, {key: renamed.get(key, key) for key in keys})


def _entities(address: str, wanted: FeatureAddress) -> Any:
    import pandas as pd

    files = find_files(wanted.entities, [])
    if len(files) != 1:
        why = f"{wanted.entities} has {len(files)} files"
        raise _refused(address, why, "name one table of entities")
    frame = read_frame(files[0], f"data.source = {address!r}")
    if TIME not in frame.columns:
        raise _refused(
            address,
            f"{wanted.entities} has no column {TIME}",
            f"name the column with the time of each row {TIME}",
        )
    if frame.empty:
        raise _refused(address, f"{wanted.entities} has no rows", "name a table with rows")
    try:
        frame[TIME] = pd.to_datetime(frame[TIME], utc=True)
    except (ValueError, TypeError) as error:
        why = f"{TIME} of {wanted.entities} is no time: {redact(str(error))}"
        raise _refused(address, why, "write times such as 2026-01-31T12:00:00Z") from error
    if missing := int(frame[TIME].isna().sum()):
        why = f"{missing:,} rows of {wanted.entities} have no {TIME}"
        raise _refused(address, why, "give each row its time, or leave it out")
    return frame


def _refused(address: str, why: str, remedy: str) -> BadInput:
    return BadInput(f"data.source = {address!r}: {why}", remedy=remedy)

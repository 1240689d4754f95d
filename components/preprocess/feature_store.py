"""Tables of a Feast feature store: the features that each entity had at the time of its record.

Feast joins them to a table of entities. The result is a Parquet file that a command keeps until its
end, with a row for each row of that table, in its order. So equal features have equal digests.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import psutil

from steadytrain.components.preprocess.frames import read_frame
from steadytrain.components.preprocess.parallel import IsolatedProcess
from steadytrain.components.preprocess.sources import find_files, refused
from steadytrain.components.shared.digest import value_digest
from steadytrain.components.shared.errors import SteadytrainError
from steadytrain.components.shared.feature_address import KIND, FeatureAddress
from steadytrain.components.shared.lease import lock
from steadytrain.components.shared.paths import local_path
from steadytrain.components.shared.processes import host_memory
from steadytrain.components.shared.redaction import redact
from steadytrain.components.shared.retry import FOREVER

TIME: Final = "event_timestamp"
"""Feast's name for the time of an entity's row."""
_ROW: Final = "steadytrain_row"
"""Column that numbers the rows that Feast is given, since it returns them in any order."""
_AT: Final = "steadytrain_time"
_VARIABLE: Final = "STEADYTRAIN_FEATURES"
"""Tells the processes that a command starts where its tables are."""
_PREFIX: Final = "steadytrain-features-"
_OWNER: Final = "owner"
"""File with the id of the process that removes a folder of tables."""
_TIMES: Final = "datetime64[us, UTC]"


def feature_table(address: str) -> Path:
    """Return a Parquet file with the table at an address.

    It is retrieved once: all processes of a command see one state of the store.

    Raises:
        BadInput: the store or the entities cannot be read, or Feast is not installed.
    """
    wanted = FeatureAddress.parse(address)
    folder, home = local_path(wanted.folder), _home()
    result = home / value_digest([address, str(Path.cwd())]) / "features.parquet"
    with lock(str(home), "features", wait_seconds=FOREVER):
        if not result.exists():
            _check(address, folder)
            result.parent.mkdir(exist_ok=True)
            partial = result.with_suffix(".partial")
            with IsolatedProcess(host_memory()) as isolated:
                for _ in isolated.iterate(address, _retrieve, address, wanted, folder, partial):
                    pass
            partial.rename(result)
    return result


def _check(address: str, folder: Path) -> None:
    if find_spec(KIND) is None:
        raise refused(
            address,
            "Feast is not installed",
            "pip install 'steadytrain[feast]'; on a cluster, use an image for the steps with it",
        )
    if not (folder / "feature_store.yaml").is_file():
        why = f"{folder} has no feature_store.yaml"
        raise refused(address, why, "give the folder of a Feast feature repository")


def _home() -> Path:
    """Return the folder of this command's tables, which the first process to ask makes.

    That process removes it at its end. What one that was killed has left is removed here.
    """
    home = os.environ.get(_VARIABLE, "")
    if Path(home, _OWNER).is_file():
        return Path(home)
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError, ValueError):
            if not psutil.pid_exists(int((left / _OWNER).read_text(encoding="ascii"))):
                shutil.rmtree(left)
    made, owner = Path(tempfile.mkdtemp(prefix=_PREFIX)), os.getpid()
    (made / _OWNER).write_text(str(owner), encoding="ascii")
    os.environ[_VARIABLE] = str(made)

    def remove() -> None:
        # A fork has this function too.
        if os.getpid() == owner:
            shutil.rmtree(made, ignore_errors=True)

    atexit.register(remove)
    return made


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
        for join in _joins(address, store, wanted):
            if absent := [key for key in join.keys.values() if key not in entities.columns]:
                why = f"{join.view.name} joins by {absent[0]}, which {wanted.entities} has not"
                raise refused(address, why, "add the column, or rename one")
            for name in join.features:
                if name in table.columns:
                    other = "of another view" if name in features else f"of {wanted.entities}"
                    why = (
                        f"the feature {name} of {join.view.name} and a column {other} have one name"
                    )
                    raise refused(address, why, "rename one of them")
                features.add(name)
            for name, values in join.joined(address, store, entities).items():
                table[name] = values.to_numpy()
    except (SteadytrainError, MemoryError):
        raise
    except Exception as error:
        # Feast raises errors of its own, of pandas, and of whatever its stores are made of.
        why = f"Feast cannot retrieve it ({type(error).__name__}: {redact(str(error))})"
        raise refused(
            address, why, "fix the store, the names of its features, or the table of entities"
        ) from error
    if table[sorted(features)].isna().all(axis=None):
        raise refused(
            address,
            f"none of the {len(table):,} rows of {wanted.entities} has a feature at its time",
            f"compare its keys and {TIME} with those of the store, and the time to live of the "
            "feature views",
        )
    content = pa.Table.from_pandas(table, preserve_index=False)
    pq.write_table(content.replace_schema_metadata(), result)
    yield


@dataclass(frozen=True)
class _ViewJoin:
    """The features of one view.

    keys: column of the entities by the join key of the view.
    """

    view: Any
    features: Sequence[str]
    keys: Mapping[str, str]

    def joined(self, address: str, store: Any, entities: Any) -> Any:
        """Return a frame of the features, with a row for each entity's.

        Views are joined one by one, and each key and time once, with a number: where a feature of
        one view has expired, Feast may drop the row with the features of all views.
        """
        columns = [*self.keys.values(), TIME]
        number = entities.groupby(columns, dropna=False, sort=False).ngroup()
        known = entities[columns].assign(**{_ROW: number}).dropna().drop_duplicates(_ROW)
        known = known.rename(columns={column: key for key, column in self.keys.items()})
        if _has_files(store):
            found = self._in_files(address, store, known)
        else:
            found = self._by_feast(store, known)
        return found.set_index(_ROW)[list(self.features)].reindex(number)

    def _by_feast(self, store: Any, known: Any) -> Any:
        return store.get_historical_features(
            entity_df=known.reset_index(drop=True),
            features=[f"{self.view.name}:{name}" for name in self.features],
        ).to_df()

    def _in_files(self, address: str, store: Any, known: Any) -> Any:
        """Return the rows with their features, from the files that the view reads.

        Feast's own join of files sorts in no stable order, so it may take any of several rows of
        one time, and loses and mixes up rows of tables with several files.
        """
        import pandas as pd

        source, keys = self.view.batch_source, list(self.keys)
        rows = _table_of(store, source)
        orders = [source.timestamp_field, source.created_timestamp_column]
        for name in filter(None, orders):
            rows[name] = pd.to_datetime(rows[name], utc=True).astype(_TIMES)
        rows = rows.dropna(subset=[source.timestamp_field, *keys])
        for name in reversed(list(filter(None, orders))):
            rows = rows.sort_values(name, kind="stable", na_position="first")
        for key in keys:
            known[key], rows[key] = _alike(address, self.view.name, known[key], rows[key])
        right = rows[list(dict.fromkeys([*keys, *self.features]))].assign(**{_AT: rows[orders[0]]})
        return pd.merge_asof(
            known.assign(**{_AT: known[TIME].astype(_TIMES)})
            .drop(columns=TIME)
            .sort_values(_AT, kind="stable"),
            right,
            on=_AT,
            by=keys or None,
            tolerance=self.view.ttl or None,
        )


def _has_files(store: Any) -> bool:
    """Return whether a store keeps its tables in Parquet files, which Feast joins by Dask."""
    from feast.infra.offline_stores.dask import DaskOfflineStoreConfig

    return isinstance(store.config.offline_store, DaskOfflineStoreConfig)


def _table_of(store: Any, source: Any) -> Any:
    """Return all rows of a source of files, by the names that its features have."""
    import pyarrow.parquet as pq
    from feast import FileSource

    options = source.file_options
    filesystem, path = FileSource.create_filesystem_and_path(
        str(FileSource.get_uri_for_file_path(repo_path=store.repo_path, uri=options.uri)),
        options.s3_endpoint_override,
        resolved_credentials=source.resolve_credentials(),
    )
    table = pq.read_table(path, filesystem=filesystem).to_pandas()
    return table.rename(columns=source.field_mapping or {})


def _alike(address: str, view: str, given: Any, stored: Any) -> tuple[Any, Any]:
    """Return keys of entities and of a view in one type, so that equal ones are equal."""
    import numpy as np
    import pandas as pd
    from pandas.api.types import is_numeric_dtype

    key = given.name
    if not is_numeric_dtype(stored.dtype):
        if is_numeric_dtype(given.dtype):
            why = f"{key} is a number in the table of entities, and a text in {view}"
            raise refused(address, why, f"write {key} as a text in both")
        return given.astype(str), stored.astype(str)
    try:
        numbers = pd.to_numeric(given).to_numpy()
    except (ValueError, TypeError) as error:
        why = f"{key} is a number in {view}, and not in the table of entities: {error}"
        raise refused(address, why, f"write {key} as a number in both") from error
    kind = np.result_type(numbers, stored.to_numpy())
    return numbers.astype(kind), stored.astype(kind)


def _joins(address: str, store: Any, wanted: FeatureAddress) -> Iterator[_ViewJoin]:
    """Yield the features that an address names, by view."""
    from feast import FeatureView
    from feast.feature_view import DUMMY_ENTITY_ID

    asked = list[tuple[str, list[str], Mapping[str, str]]]()
    if wanted.service:
        # A view may be there several times, joined by different columns.
        for view in store.get_feature_service(wanted.service).feature_view_projections:
            asked.append((view.name, [one.name for one in view.features], view.join_key_map))
    single = dict[str, list[str]]()
    for feature in dict.fromkeys(wanted.features):
        name, _, field = feature.rpartition(":")
        single.setdefault(name, []).append(field)
    asked += [(name, features, {}) for name, features in single.items()]
    views = {view.name: view for view in store.list_all_feature_views()}
    for name, features, renamed in asked:
        view = views.get(name)
        if view is not None and not isinstance(view, FeatureView):
            why = f"{name} is computed on demand, row by row"
            raise refused(address, why, "leave it out, and compute it in the table of entities")
        if view is None or (unknown := sorted(set(features) - {one.name for one in view.features})):
            what = f"the view {name}" if view is None else f"a feature {unknown[0]} in {name}"
            raise refused(address, f"the store has not {what}", "name one that it has")
        keys = [key for key in view.join_keys if key != DUMMY_ENTITY_ID]
        yield _ViewJoin(view, features, {key: renamed.get(key, key) for key in keys})


def _entities(address: str, wanted: FeatureAddress) -> Any:
    import pandas as pd
    from pandas.api.types import is_datetime64_any_dtype

    files = find_files(wanted.entities, [])
    if len(files) != 1:
        why = f"{wanted.entities} has {len(files)} files"
        raise refused(address, why, "name one table of entities")
    frame = read_frame(files[0], address, as_written=True)
    if TIME not in frame.columns:
        raise refused(
            address,
            f"{wanted.entities} has no column {TIME}; it has {', '.join(frame.columns)[:500]}",
            f"name the column with the time of each row {TIME}",
        )
    if frame.empty:
        raise refused(address, f"{wanted.entities} has no rows", "name a table with rows")
    try:
        # Pandas would guess the day and the month of 03/04/2026, and take a number as nanoseconds.
        if not is_datetime64_any_dtype(frame[TIME]):
            frame[TIME] = frame[TIME].astype("string")
        frame[TIME] = pd.to_datetime(frame[TIME], utc=True, format="ISO8601")
    except (ValueError, TypeError) as error:
        why = f"{TIME} of {wanted.entities} is no time: {redact(str(error).partition('. ')[0])}"
        raise refused(address, why, "write times such as 2026-01-31T12:00:00Z") from error
    if missing := int(frame[TIME].isna().sum()):
        why = f"{missing:,} rows of {wanted.entities} have no {TIME}"
        raise refused(address, why, "give each row its time, or leave it out")
    return frame

"""Find everything that the configured addresses refer to, before reading any of it."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import Any, Final
from urllib.parse import parse_qsl

import pyarrow as pa

from steadytrain.components.preprocess.chunks import Chunk, WithFiles
from steadytrain.components.preprocess.feature_store import feature_table
from steadytrain.components.preprocess.formats import BYTES, read_files, wanted
from steadytrain.components.preprocess.logged_datasets import PREFIX, logged_dataset
from steadytrain.components.preprocess.parallel import IsolatedProcess, cores
from steadytrain.components.preprocess.sources import SourceFile, find_files, naming
from steadytrain.components.preprocess.split import (
    DeclaredSide,
    side_from_data,
    side_of_file,
    side_of_folders,
    side_of_split,
)
from steadytrain.components.preprocess.tables import readable, tables
from steadytrain.components.shared.config import DataConfig, RunConfig
from steadytrain.components.shared.digest import value_digest
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.feature_address import is_feature_address
from steadytrain.components.shared.paths import local_path
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.tasks.base import open_encoder

_MEMORY_BYTES = 4 << 30
"""The library keeps full row groups in memory."""
_ROWS = 64
_OPTIONS = {"name", "split", "revision"}
_SAVED = ("state.json", "dataset_dict.json")
_ALONE = "all"
"""The name of a split that is loaded alone."""


def is_dataset(address: str) -> bool:
    """Return whether the `datasets` library reads an address."""
    if address.startswith("hub:"):
        return True
    folder = local_path(address)
    # Path.is_file raises where an address is too long for a path or may not be looked at.
    return any(os.path.isfile(folder / name) for name in _SAVED)  # noqa: PTH113


def read_dataset(address: str) -> Iterator[Chunk]:
    """Stream the chunks of a data set, each with the side that its split's name says.

    Raises:
        BadInput: the data set cannot be loaded.
    """
    with IsolatedProcess(_MEMORY_BYTES) as isolated:
        yield from isolated.iterate(address, _chunks, address)


def dataset_bytes(address: str) -> int | None:
    """Return the stored size of a data set on this machine. None means that it is not local."""
    name = _name(address)
    if not local_path(name).exists():
        return None
    return sum(file.size for file in find_files(name, [], Counter()))


def dataset_others(address: str) -> int:
    """Return the number of files in a saved data set's folder that the library does not read."""
    if address.startswith("hub:"):
        return 0
    files = find_files(address, [], Counter())
    return sum(not file.hidden and file.suffix not in (".arrow", ".json") for file in files)


def dataset_digest(address: str) -> str:
    """Return the digest of an address's current content: local files, or the hub's commit."""
    name = _name(address)
    if local_path(name).exists():
        left_out: Counter[str] = Counter()
        files = find_files(name, [], left_out)
        if left_out:
            # The library would read them.
            raise BadInput(
                f"data.source = {address!r} holds "
                + ", ".join(f"{count} {what}" for what, count in left_out.items()),
                remedy="remove them, or copy what they point to into the data set",
            )
        return value_digest([address, *(file.digest() for file in files)])
    from huggingface_hub import HfApi

    try:
        return value_digest([address, HfApi().dataset_info(name).sha])
    except Exception as error:
        raise _unreadable(address, error) from error


def _chunks(address: str) -> Iterator[Chunk]:
    if not address.startswith("hub:"):
        _validate(local_path(address))
    options = _parse(address)[1] if address.startswith("hub:") else {}
    alone = options.get("split", local_path(address).name)
    for split, dataset in _load(address).items():
        side = side_of_split(alone if split == _ALONE else split)
        batches = dataset.with_format("arrow").iter(batch_size=_ROWS)
        for chunk in tables(f"{address} ({split})", _record_batches(batches)):
            chunk.given = side or "train"
            yield chunk


def _validate(folder: Path) -> None:
    """Validate a saved data set, because the library extracts rows before it validates them."""
    for path in sorted(folder.rglob("*.arrow")):
        with readable(str(path)), pa.memory_map(str(path)) as handle:
            for batch in pa.ipc.open_stream(handle):
                batch.validate(full=True)


def _record_batches(batches: Any) -> Iterator[Any]:
    for table in batches:
        yield from table.to_batches()


def _load(address: str) -> dict[str, Any]:
    import datasets

    try:
        if not address.startswith("hub:"):
            loaded = datasets.load_from_disk(str(local_path(address)))
        else:
            name, options = _parse(address)
            loaded = datasets.load_dataset(name, streaming=True, **options)
    except BadInput:
        raise
    except Exception as error:
        raise _unreadable(address, error) from error
    return dict(loaded) if isinstance(loaded, dict) else {_ALONE: loaded}


def _name(address: str) -> str:
    return _parse(address)[0] if address.startswith("hub:") else address


def _parse(address: str) -> tuple[str, dict[str, str]]:
    name, _, query = address.removeprefix("hub:").partition("?")
    options = dict(parse_qsl(query))
    unknown = sorted(options.keys() - _OPTIONS)
    if unknown:
        raise BadInput(
            f"data.source = {address!r}: unknown option {unknown[0]}",
            remedy=f"one of {', '.join(sorted(_OPTIONS))}",
        )
    return name, options


def _unreadable(address: str, error: Exception) -> BadInput:
    return BadInput(
        f"data.source = {address!r}: the data set cannot be loaded ({type(error).__name__}: "
        f"{str(error).splitlines()[0] if str(error) else ''})",
        remedy="check name, split and network; a private one needs HF_TOKEN in the environment; "
        "the name of a model belongs in model.base",
    )


OWN_OUTPUT: Final = "files in the output folder"
UNREAD_THERE: Final = "files in the folder of a saved data set that are not its own"
TWICE: Final = "files that another address names too"

_SIDES: Final[dict[str, DeclaredSide]] = {
    "data.validation_source": "validation",
    "data.test_source": "test",
}


@dataclass(frozen=True)
class Inputs:
    """Files, each with its format, and data sets that the `datasets` library reads.

    given: the side of files and data sets, by name. Those of `data.source` that name none have
        none; the splits of a data set are known only when they are read.
    left_out: number of files that are not data, by kind (see `local_files.py`), and OWN_OUTPUT.
    parts: of each part alone, if there are several (`data.parts`).
    attached: files that records name, by the folder of the table that has the records.
    named: the columns with their names, and their suffixes, as `Encoder.attached` has them.
    """

    files: list[tuple[SourceFile, str]]
    datasets: list[str]
    given: Mapping[str, DeclaredSide] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    parts: Mapping[str, Inputs] = field(default_factory=dict)
    attached: Mapping[Path, list[SourceFile]] = field(default_factory=dict)
    named: tuple[Sequence[str], frozenset[str]] | None = None

    @property
    def bytes(self) -> int | None:
        """Return the stored size of all input. None means that it is not known in advance."""
        return None if self.datasets else sum(file.size for file, _ in self.files)

    @property
    def stored_bytes(self) -> int | None:
        """Return the same size, but count data sets on this machine by their files.

        None means that a data set is not on this machine.
        """
        attached = (file.size for files in self.attached.values() for file in files)
        sizes = [
            *(file.size for file, _ in self.files),
            *attached,
            *map(dataset_bytes, self.datasets),
        ]
        known = [size for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) else None

    def digest(self) -> str:
        """Return the digest of the content, independent of the order of the files."""
        if self.parts:
            return value_digest({name: part.digest() for name, part in self.parts.items()})
        with ThreadPoolExecutor(cores()) as pool:
            digests = list(pool.map(SourceFile.digest, [file for file, _ in self.files]))
            beside = {file.name: file for files in self.attached.values() for file in files}
            contents = list(pool.map(SourceFile.digest, beside.values()))
        named = [
            [file.path, name, digest, *filter(None, [self.given.get(file.name)])]
            for (file, name), digest in zip(self.files, digests, strict=True)
        ]
        datasets = list[str]()
        for address in self.datasets:
            with self._naming(address):
                datasets.append(dataset_digest(address) + self.given.get(address, ""))
        attached = [sorted(zip(beside, contents, strict=True))] if beside else []
        return value_digest([sorted(named), sorted(datasets), *attached])

    def chunks_by_part(self, data: DataConfig, scratch: Path) -> Iterator[tuple[DataConfig, Chunk]]:
        """Yield everything in chunks, as `chunks` does, each with the settings of its part."""
        for name, part in data.by_part().items():
            for chunk in self.parts.get(name, self).chunks(part, scratch):
                yield part, chunk

    def chunks(self, data: DataConfig, scratch: Path) -> Iterator[Chunk]:
        """Yield everything in chunks. Downloads are in `scratch` temporarily."""
        for given in dict.fromkeys(self.given.get(file.name, "train") for file, _ in self.files):
            of_side = [
                each for each in self.files if self.given.get(each[0].name, "train") == given
            ]
            for chunk in read_files(of_side, data, scratch):
                chunk.given = given
                yield self.filled(chunk, data)
        for address in self.datasets:
            with self._naming(address):
                for chunk in read_dataset(address):
                    named = chunk.given if chunk.given != "pooled" else None
                    chunk.given = self.given.get(address) or side_from_data(named, data, address)
                    yield chunk

    def filled(self, chunk: Chunk, data: DataConfig) -> Chunk:
        """Return a chunk whose rows have the content of the files that they name."""
        folder = self.folders.get(getattr(chunk, "source", ""))
        if folder is None or self.named is None:
            return chunk
        return WithFiles(chunk, folder, *self.named, limit=data.max_record_bytes)

    @cached_property
    def folders(self) -> Mapping[str, Path]:
        """The folder of each table whose records name files, by the name of the table."""
        local = [file for file, _ in self.files if isinstance(file.location, Path)]
        places = {file.name: file.location.parent for file in local}  # type: ignore[union-attr]
        return {name: folder for name, folder in places.items() if folder in self.attached}

    def _naming(self, dataset: str) -> contextlib.AbstractContextManager[None]:
        side = self.given.get(dataset)
        return naming(f"data.{side}_source" if side else "data.source")


def find_inputs(data: DataConfig, output: Path | None = None, store: str | None = None) -> Inputs:
    """Return the inputs of a configuration. A file that two addresses name is read once.

    If `data.test_source` and `data.source` both name a file, it is given to the test side.

    Args:
        output: folder of the runs. What is in it is no data, even if the source contains it: a run
            would read what it writes. An address may still name a place in it.
        store: `tracking.uri`, where the data sets are that MLflow runs have logged.

    Raises:
        BadInput: nothing at an address can be read, or the content differs from what was logged.
        TrackingError: the tracking store that an address needs cannot be used.
    """
    if data.parts and not data.part:
        parts = {name: find_inputs(part, output, store) for name, part in data.by_part().items()}
        return Inputs(
            [file for part in parts.values() for file in part.files],
            [address for part in parts.values() for address in part.datasets],
            {},
            sum((part.left_out for part in parts.values()), Counter()),
            parts,
        )
    encoder = open_encoder(data)
    whole_files = getattr(encoder, "whole_files", ())
    named = getattr(encoder, "attached", None)
    files: dict[str, tuple[SourceFile, str]] = {}
    datasets: dict[str, None] = {}
    given: dict[str, DeclaredSide] = {}
    left_out: Counter[str] = Counter()
    addresses = [
        (field, each, address)
        for field, address in data.addresses
        for each in _resolved(field, address, data, output, store)
    ]
    for source, address, given_as in addresses:
        with naming(source):
            if is_dataset(address):
                datasets[address] = None
                names = [address]
                if others := dataset_others(address):
                    left_out[UNREAD_THERE] += others
            else:
                files_there = find_files(address, data.exclude, left_out)
                if is_feature_address(given_as):
                    # The file itself has another name in each process, and ends with it.
                    files_there = [replace(each, name=given_as) for each in files_there]
                if output is not None:
                    files_there = _outside(output, files_there, address, left_out)
                if named:
                    # They are read when a record names them.
                    tables = [each for each in files_there if each.suffix.lower() not in named[1]]
                    files_there = tables or files_there
                result = wanted(files_there, address, data, left_out, whole_files)
                names = [file.name for file, _ in result]
                if source not in _SIDES and (twice := len(files.keys() & set(names))):
                    left_out[TWICE] += twice
                files |= {file.name: (file, name) for file, name in result}
            if source in _SIDES:
                given |= dict.fromkeys(names, _SIDES[source])
    ours = [each for each in files.values() if each[0].name not in given]
    return Inputs(
        list(files.values()),
        list(datasets),
        _named(ours, data) | given,
        left_out,
        attached=_attached([file for file, _ in files.values()], named[1]) if named else {},
        named=named,
    )


def inputs_of(config: RunConfig) -> Inputs:
    """Return the inputs of a run.

    Raises:
        BadInput, TrackingError: as for `find_inputs`, or the output cannot be a folder.
    """
    return find_inputs(config.data, Workspace.of(config).output, config.tracking.uri)


def _resolved(
    field: str, address: str, data: DataConfig, output: Path | None, store: str | None
) -> Sequence[str]:
    """Return the addresses of the data themselves, of which the content is what was logged."""
    if is_feature_address(address):
        with naming(field):
            return [str(feature_table(address))]
    if not address.startswith(PREFIX):
        return [address]
    with naming(field):
        logged = logged_dataset(address, store, output)
        if not logged.inputs:
            logged.check(data.exclude)
            return logged.sources
        alone = {"source": list(logged.sources), "validation_source": [], "test_source": []}
        inputs = find_inputs(data.model_copy(update=alone), output, store).digest()
        if inputs != logged.inputs:
            raise logged.changed(inputs)
        # An earlier run may itself have read what another one had logged.
        return [
            each
            for source in logged.sources
            for each in _resolved(field, source, data, output, store)
        ]


def _attached(tables: list[SourceFile], suffixes: frozenset[str]) -> dict[Path, list[SourceFile]]:
    """Return the files with some suffixes in and below the folder of each local table."""
    folders = {file.location.parent: None for file in tables if isinstance(file.location, Path)}
    result = dict[Path, list[SourceFile]]()
    for folder in folders:
        files = find_files(str(folder), [], Counter())
        others = [file for file in files if file.suffix.lower() in suffixes]
        if others:
            result[folder] = others
    return result


def _named(files: list[tuple[SourceFile, str]], data: DataConfig) -> dict[str, DeclaredSide]:
    """Return the side that files of `data.source` have by their names; "train" is left out.

    Folders that all files share say nothing if an address names them, and neither does a name in a
    source tree.
    """
    paths = [PurePosixPath(file.name) for file, _ in files]
    levels = zip(*(path.parent.parts for path in paths), strict=False)
    shared = sum(1 for _ in takewhile(lambda names: len(set(names)) == 1, levels))
    result = dict[str, DeclaredSide]()
    for (file, kind), path in zip(files, paths, strict=True):
        above = len(path.parts) - len(PurePosixPath(file.path).parts)
        inside = PurePosixPath(*path.parts[min(shared, above) :])
        if kind == BYTES:
            # A file's name says nothing, and its folder is its class.
            side = side_of_folders(inside.parts[:-2])
        else:
            side = None if kind == "source" else side_of_file(inside, file.suffix)
        if (given := side_from_data(side, data, file.name)) != "train":
            result[file.name] = given
    return result


def _outside(
    output: Path, files: list[SourceFile], address: str, left_out: Counter[str]
) -> list[SourceFile]:
    """Leave out the files in the output folder, unless the address is in it."""
    output = output.resolve()
    if local_path(address).resolve().is_relative_to(output):
        return files
    kept = [
        file
        for file in files
        if not (isinstance(file.location, Path) and file.location.is_relative_to(output))
    ]
    if not kept:
        raise BadInput(
            f"data.source = {address!r}: all {len(files)} files are in the output folder {output}",
            remedy="name the folder of the data, or set another output",
        )
    if len(kept) < len(files):
        left_out[OWN_OUTPUT] += len(files) - len(kept)
    return kept

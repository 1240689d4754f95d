"""Data sets that the `datasets` library reads, by name or from a folder that it saved.

hub:NAME, hub:NAME?name=CONFIGURATION&split=SPLIT&revision=REVISION. A name may also be the path of
a local data set. Without a split, all of them are read. Their names may say a side (`split.py`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pyarrow as pa

from steadytrain.components.preprocess.chunks import Chunk
from steadytrain.components.preprocess.isolated import Apart
from steadytrain.components.preprocess.sources import find_files
from steadytrain.components.preprocess.split import side_of_split
from steadytrain.components.preprocess.tables import readable, tables
from steadytrain.components.shared.digest import value_digest
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.paths import local_path

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
    with Apart(_MEMORY_BYTES) as apart:
        yield from apart.iterate(address, _chunks, address)


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

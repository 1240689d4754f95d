"""Data sets that the `datasets` library reads: by name, or as the folder it saved.

hub:NAME, hub:NAME?name=CONFIGURATION&split=SPLIT&revision=REVISION; a name may
also be the path of a local data set. Without a split, all of them are read: the
split of the product is its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from steadytrain.components.preprocess.chunks import Chunk
from steadytrain.components.preprocess.formats import tables
from steadytrain.components.preprocess.sources import find_files
from steadytrain.components.shared.digest import value_digest
from steadytrain.components.shared.errors import BadInput

_OPTIONS = {"name", "split", "revision"}
_SAVED = ("state.json", "dataset_dict.json")


def is_dataset(address: str) -> bool:
    """Whether an address is read by the `datasets` library."""
    if address.startswith("hub:"):
        return True
    folder = Path(address).expanduser()
    return any((folder / name).is_file() for name in _SAVED)


def read_dataset(address: str) -> Iterator[Chunk]:
    """The chunks of a data set, streamed.

    Raises:
        BadInput: it cannot be loaded.
    """
    for split, dataset in _load(address).items():
        batches = dataset.with_format("arrow").iter(batch_size=1024)
        yield from tables(f"{address} ({split})", _record_batches(batches))


def dataset_digest(address: str) -> str:
    """Digest of what an address stands for now: local files, or the hub's commit."""
    name = _parse(address)[0] if address.startswith("hub:") else address
    if Path(name).expanduser().exists():
        files = find_files(name, [])
        return value_digest([address, *(file.digest() for file in files)])
    from huggingface_hub import HfApi

    try:
        return value_digest([address, HfApi().dataset_info(name).sha])
    except Exception as error:
        raise _unreadable(address, error) from error


def _record_batches(batches: Any) -> Iterator[Any]:
    for table in batches:
        yield from table.to_batches()


def _load(address: str) -> dict[str, Any]:
    import datasets

    try:
        if not address.startswith("hub:"):
            loaded = datasets.load_from_disk(str(Path(address).expanduser()))
        else:
            name, options = _parse(address)
            loaded = datasets.load_dataset(name, streaming=True, **options)
    except BadInput:
        raise
    except Exception as error:
        raise _unreadable(address, error) from error
    return dict(loaded) if isinstance(loaded, dict) else {"all": loaded}


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
        remedy="check name, split and network; a private one needs HF_TOKEN in the environment",
    )

"""Where predictions go: a file here, or an object on S3 that appears when it is complete."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

from steadytrain.components.predict.batch import SUFFIXES, refused_file
from steadytrain.components.shared.errors import BadInput, StorageError
from steadytrain.components.shared.storage import S3Storage, open_storage

S3: Final = "s3://"


def check_destination(out: str, *, overwrite: bool) -> None:
    """Check that predictions can go to an address, before the model is loaded.

    Raises:
        BadInput: its suffix is none of a format, its folder is missing, or it exists.
        StorageError: S3 does not answer, or refuses.
    """
    suffix = PurePosixPath(out).suffix
    if suffix not in SUFFIXES:
        raise BadInput(
            f"--out {out}: {suffix or 'no suffix'} is not a format of predictions",
            remedy=f"use {', '.join(SUFFIXES)}",
        )
    if out.startswith(S3):
        place, name = _object(out)
        # This needs the bucket, which a look at an object does not.
        place.drop_unfinished(name)
        exists = place.exists(name) and not overwrite
    else:
        path = Path(out)
        if not path.parent.is_dir():
            raise BadInput(
                f"--out {out}: the folder {path.parent} does not exist", remedy="make it first"
            )
        exists = path.is_dir() or (path.exists() and not overwrite)
    if exists:
        raise BadInput(f"--out {out} exists", remedy="add --overwrite, or give another name")


@contextlib.contextmanager
def local_file(out: str) -> Iterator[Path]:
    """Yield the file to write. If the address is on S3, it is copied there when the body ends.

    The file of records that were refused is copied first. If the body fails or the copy does, the
    local files stay, and the error says where they are.

    Raises:
        StorageError: the copy failed.
    """
    if not out.startswith(S3):
        yield Path(out)
        return
    place, name = _object(out)
    folder = Path(tempfile.mkdtemp(prefix="steadytrain-predict-"))
    path = folder / name
    try:
        yield path
        refused = refused_file(path)
        if refused.is_file():
            place.upload(refused, refused.name)
        elif place.exists(refused.name):
            # Of predictions that these replace.
            place.delete(refused.name)
        place.upload(path, name)
    except StorageError as error:
        if path.is_file():
            error.remedy = f"{error.remedy}; the predictions are in {path}".removeprefix("; ")
        raise
    else:
        shutil.rmtree(folder)
    finally:
        # A body that failed before it wrote anything leaves an empty folder.
        with contextlib.suppress(OSError):
            folder.rmdir()


def _object(address: str) -> tuple[S3Storage, str]:
    """Return the storage of an object's folder, and the object's name in it.

    Raises:
        BadInput: the address names no bucket.
    """
    above, _, name = address.rpartition("/")
    place = open_storage(above) if len(above) > len(S3) else S3Storage(address)
    assert isinstance(place, S3Storage)
    return place, name

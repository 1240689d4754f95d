"""Where predictions go: a file here, or an object on S3 that appears when it is complete."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

from steadytrain.components.predict.batch import SUFFIXES, refused_file
from steadytrain.components.shared.digest import value_digest
from steadytrain.components.shared.errors import BadInput, RunBusy, StorageError
from steadytrain.components.shared.lease import try_lock
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
        storage, name = _object(out)
        # This needs the bucket, which a look at an object does not.
        storage.drop_unfinished(name)
        exists = storage.exists(name) and not overwrite
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
    local files stay, and the error says where they are. The folder's name follows from the address,
    so that a repeated command continues after a kill.

    Raises:
        BadInput: the folder is another user's.
        RunBusy: another process writes to the address.
        StorageError: the copy failed.
    """
    if not out.startswith(S3):
        yield Path(out)
        return
    storage, name = _object(out)
    folder = Path(
        tempfile.gettempdir(), f"steadytrain-predict-{os.getuid()}-{value_digest(out)[:16]}"
    )
    path, claim = folder / name, _claimed(folder, out)
    try:
        yield path
        refused = refused_file(path)
        if refused.is_file():
            storage.upload(refused, refused.name)
        elif storage.exists(refused.name):
            # A file of the predictions that these replace.
            storage.delete(refused.name)
        storage.upload(path, name)
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
        os.close(claim)


def _claimed(folder: Path, out: str) -> int:
    """Make a folder, unless an earlier command did, and return it as an open file that is locked.

    Raises:
        BadInput: another user made it, who could read and change what is in it.
        RunBusy: another process writes there.
        StorageError: it cannot be made.
    """
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise StorageError(
            f"cannot write to {folder}: {error.strerror}", remedy="set TMPDIR to another folder"
        ) from error
    about = os.fstat(handle)
    if about.st_uid != os.getuid() or about.st_mode & 0o077:
        os.close(handle)
        raise BadInput(
            f"{folder} can be used by others, and predictions for {out} go through it",
            remedy="remove it, or set TMPDIR to another folder",
        )
    if not try_lock(handle):
        os.close(handle)
        raise RunBusy(f"another process writes {out}", remedy="wait for it, or give another --out")
    return handle


def _object(address: str) -> tuple[S3Storage, str]:
    """Return the storage of an object's folder, and the object's name in it.

    Raises:
        BadInput: the address names no bucket.
    """
    above, _, name = address.rpartition("/")
    storage = open_storage(above) if len(above) > len(S3) else S3Storage(address)
    assert isinstance(storage, S3Storage)
    return storage, name

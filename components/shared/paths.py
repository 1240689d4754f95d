"""Paths below a folder: of a run's own files, and of names from outside.

Outside is a key, a manifest or a command line. No other module joins such a name to a folder.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from pathlib import Path

from steadytrain.components.shared.errors import BadInput


class Inside:
    """An attribute that is a path in a folder, which is another attribute of the same object.

    folder: name of the attribute with the folder.
    """

    def __init__(self, folder: str, name: str) -> None:
        self.folder, self.name = folder, name

    def __get__(self, owner: object, _: object = None) -> Path:
        folder: Path = getattr(owner, self.folder)
        return folder / self.name


class UnsafeName(BadInput):
    """A name that is not the plain relative path of one file."""


def below(folder: Path, name: str, *, origin: str) -> Path:
    """Return the path of `name` below `folder`. The folder itself may be at any path.

    Args:
        folder: the folder that the path must stay in.
        name: a relative path with forward slashes.
        origin: where the name comes from, for the error message.

    Raises:
        UnsafeName: if the name leads out of the folder, including through a symbolic link, or could
            mean a different file on another system (empty parts, `.`, backslashes, NUL).
    """
    path = folder / checked(name, origin=origin)
    if not path.resolve().is_relative_to(folder.resolve()):
        raise UnsafeName(
            f"{origin}: {name!r} leaves {folder} through a symbolic link",
            remedy="remove the link, or give the folder that it points to",
        )
    return path


def checked(name: str, *, origin: str) -> str:
    """Return the name if it is the plain relative path of a file. The disk is not read.

    Raises:
        UnsafeName: if it is not.
    """
    parts = name.split("/")
    if "\0" in name or "\\" in name or any(part in ("", ".", "..") for part in parts):
        raise UnsafeName(
            f"{origin}: {name!r} is not the name of a file below a folder",
            remedy="rename it: no '..', '.', empty part, leading slash, backslash or NUL",
        )
    return name


def check_distinct(names: Iterable[str], *, origin: str) -> None:
    """Reject names that cannot all be files of one folder on every file system.

    Raises:
        UnsafeName: if one name is a parent folder of another, or two differ only in case or Unicode
            form.
    """
    files: dict[str, str] = {}
    for name in names:
        other = files.setdefault(_folded(name), name)
        if other != name:
            raise _collision(origin, other, name)
    for folded, name in files.items():
        parts = folded.split("/")
        for count in range(1, len(parts)):
            if (above := "/".join(parts[:count])) in files:
                raise _collision(origin, files[above], name)


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def _collision(origin: str, one: str, other: str) -> UnsafeName:
    return UnsafeName(
        f"{origin}: {one!r} and {other!r} collide as file names",
        remedy="rename or remove one of the two",
    )


def local_path(address: str) -> Path:
    """Return a path with ~ and ~NAME expanded to home folders.

    Raises:
        BadInput: if there is no such home folder.
    """
    try:
        return Path(address).expanduser()
    except RuntimeError as error:
        raise BadInput(
            f"{address!r}: there is no such home folder", remedy="give an absolute path"
        ) from error

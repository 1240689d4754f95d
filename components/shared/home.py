"""Paths of this machine as people write them."""

from __future__ import annotations

from pathlib import Path

from steadytrain.components.shared.errors import BadInput


def local_path(address: str) -> Path:
    """A path in which ~ and ~NAME stand for a home folder.

    Raises:
        BadInput: nobody knows that folder.
    """
    try:
        return Path(address).expanduser()
    except RuntimeError as error:
        raise BadInput(
            f"{address!r}: there is no such home folder", remedy="give an absolute path"
        ) from error

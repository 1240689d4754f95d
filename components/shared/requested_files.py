"""Files that users request at a path of their choice."""

from __future__ import annotations

from pathlib import Path

from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.storage.local import room_for


def write_requested(path: Path, content: bytes, option: str) -> None:
    """Write a file and create its parent folders.

    Args:
        path: the file.
        content: what to write.
        option: where the path comes from, for the error message.

    Raises:
        BadInput: if it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise BadInput(
            f"{option} {path} cannot be written: {error.strerror}",
            remedy=f"give another path, or {room_for(error)}",
        ) from error

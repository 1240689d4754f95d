"""Files that a person asks for by a path of their own."""

from __future__ import annotations

from pathlib import Path

from steadytrain.components.shared.errors import BadInput


def write_asked(path: Path, content: bytes, option: str) -> None:
    """Writes a file, and the folders above it.

    Args:
        option: where the path comes from, for the message.

    Raises:
        BadInput: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise BadInput(
            f"{option} {path} cannot be written: {error.strerror}",
            remedy="give another path, or permission and space there",
        ) from error

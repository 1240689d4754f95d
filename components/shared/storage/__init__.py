"""Folders and S3 behind one small interface."""

from pathlib import Path

from steadytrain.components.shared.storage.base import Storage
from steadytrain.components.shared.storage.local import LocalStorage
from steadytrain.components.shared.storage.s3 import S3Storage

__all__ = ["LocalStorage", "S3Storage", "Storage", "open_storage"]


def open_storage(uri: str) -> Storage:
    """Return the storage at an address: s3://bucket/prefix, or a folder's path."""
    if uri.startswith("s3://"):
        return S3Storage(uri)
    return LocalStorage(Path(uri))

"""Which side of the split a record belongs to.

A pure function of the salt and of the record's content or group: neither the
order of files nor what else is in the data set moves a record.
"""

from __future__ import annotations

import hashlib
from typing import Final
from unicodedata import normalize

from steadytrain.components.shared.config import DataConfig
from steadytrain.components.shared.digest import value_digest
from steadytrain.components.shared.records import Side

SIDES: Final[tuple[Side, ...]] = ("test", "validation", "train")
"""The held-out sides first: of two duplicates the one that comes first here stays."""

ID_BYTES: Final = 16


def content_id(content: str) -> bytes:
    """Identity of a record: the first 16 bytes of the SHA-256 of its content in form NFC.

    Only here: what is learned from stays as it is written.
    """
    return hashlib.sha256(normalize("NFC", content).encode()).digest()[:ID_BYTES]


def side_of(identity: bytes, group: str | None, data: DataConfig) -> Side:
    """The side of a record, by its group where it has one, else by its identity."""
    key = (
        b"content\0" + identity if group is None else b"group\0" + normalize("NFC", group).encode()
    )
    digest = hashlib.sha256(data.split_salt.encode() + b"\0" + key).digest()
    position = int.from_bytes(digest[:8], "big") / 2**64
    if position < data.test_share:
        return "test"
    if position < data.test_share + data.validation_share:
        return "validation"
    return "train"


def split_digest(data: DataConfig) -> str:
    """Equal where equal records are on equal sides."""
    return value_digest(
        [data.split_salt, data.validation_share, data.test_share, data.columns.group]
    )

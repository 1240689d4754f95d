"""Assign each record to a side of the split.

The side depends only on the salt and on the record's content or group. The order of files and the
rest of the data set don't move a record.
"""

from __future__ import annotations

import hashlib
from typing import Final
from unicodedata import normalize

from steadytrain.components.shared.config import DataConfig
from steadytrain.components.shared.digest import value_digest
from steadytrain.components.shared.records import Side

SIDES: Final[tuple[Side, ...]] = ("test", "validation", "train")
"""Held-out sides come first: of two duplicates, the one on the earlier side is kept."""

ID_BYTES: Final = 16


def content_id(content: str) -> bytes:
    """Return a record's identity: the first 16 bytes of the SHA-256 of its content in NFC.

    Only the identity is normalized. Training uses the text as written.
    """
    return hashlib.sha256(normalize("NFC", content).encode()).digest()[:ID_BYTES]


def hashed(group: str) -> str:
    """Return a short name for a group, such as that of all answers to a prompt."""
    return content_id(group).hex()


def identity_in(part: str, identity: bytes) -> bytes:
    """Return the identity of a record of a part: a text may be in several parts, as in one."""
    return hashlib.sha256(part.encode() + b"\0" + identity).digest()[:ID_BYTES]


def side_of(identity: bytes, group: str | None, data: DataConfig) -> Side:
    """Return the side of a record, by its group if it has one, otherwise by its identity."""
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
    """Return a digest of the settings that determine the split.

    If two digests are equal, equal records are on equal sides.
    """
    groups = {name: part.columns.group for name, part in data.parts.items()}
    return value_digest(
        [
            *(data.split_salt, data.validation_share, data.test_share),
            groups or data.columns.group,
            *([] if data.group_by_prompt else ["prompts"]),
        ]
    )

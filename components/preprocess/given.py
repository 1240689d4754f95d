"""The side that the data give a record themselves: by a field, or the name of a file or split."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Final, Literal

from steadytrain.components.shared.config import DataConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.records import Side

Given = Literal[Side, "pooled"]
"""The side of a split, or "pooled" for a held-out one that is not kept. Without a split: train."""

_SIDES: Final[dict[str, Side]] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""The words that the `datasets` library looks for, too."""
_SHARD: Final = re.compile(r"-[0-9]+-of-[0-9]+(-[0-9a-f]{16})?$|[-_.]?[0-9]+$")
_BETWEEN: Final = re.compile(r"[\W_]+")


def side_of_split(name: str) -> Side | None:
    """Return the side that the first or last word of a split's name says, if they agree.

    A shard's number does not count: `imdb-train`, `test_sft`, `test-00000-of-00002`.
    """
    words = [word for word in _BETWEEN.split(_SHARD.sub("", name).lower()) if word]
    sides = {_SIDES[word] for word in (*words[:1], *words[-1:]) if word in _SIDES}
    return sides.pop() if len(sides) == 1 else None


def side_of_file(path: PurePosixPath, suffix: str) -> Side | None:
    """Return the side that the name of a file says, or else that of a folder, such as `dev`."""
    name = path.name.rpartition(suffix)[0] if suffix else path.name
    folders = (_SIDES.get(folder.lower()) for folder in reversed(path.parts[:-1]))
    return side_of_split(name) or next(filter(None, folders), None)


def given_by(side: Side | None, data: DataConfig, where: str) -> Given:
    """Return what becomes of records in data.source whose name says a side.

    Raises:
        BadInput: a field gives that side, too.
    """
    if side in (None, "train"):
        return "train"
    if data.splits == "pool":
        return "pooled"
    field = f"data.{side}_source"
    if any(name == field for name, _ in data.addresses):
        raise BadInput(
            f"{field} is set, but data.source has records of that side too: {where}",
            remedy=f"leave {field} out, or leave those records out of data.source "
            "(data.exclude, or hub:NAME?split=train), or set data.splits: pool, to train on them",
        )
    return side

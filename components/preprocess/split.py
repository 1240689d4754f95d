"""Which side a record is on: by its own data, or an equal share of each class on every side."""

from __future__ import annotations

import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Final, Literal
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

from steadytrain.components.shared.class_names import folded
from steadytrain.components.shared.config import DataConfig
from steadytrain.components.shared.digest import value_digest
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.records import Side

DeclaredSide = Literal[Side, "pooled"]
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
    return side_of_split(name) or side_of_folders(path.parts[:-1])


def side_of_folders(names: Sequence[str]) -> Side | None:
    """Return the side that the innermost folder with the name of one says."""
    return next(filter(None, (_SIDES.get(name.lower()) for name in reversed(names))), None)


def side_from_data(side: Side | None, data: DataConfig, where: str) -> DeclaredSide:
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


# Assign each record to a side of the split.
#
# The side depends on the salt and on the record's content or group. The order of files and the
# rest of the data set don't move a record, except to divide classes evenly (`labels.py`).

SIDES: Final[tuple[Side, ...]] = ("test", "validation", "train")
"""Held-out sides come first: of two duplicates, the one on the earlier side is kept."""

TRAIN: Final = SIDES.index("train")

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


def hash_position(identity: bytes, group: str | None, salt: str) -> int:
    """Return a record's position below 2**64, by its group if it has one, else by its identity."""
    key = (
        b"content\0" + identity if group is None else b"group\0" + normalize("NFC", group).encode()
    )
    digest = hashlib.sha256(salt.encode() + b"\0" + key).digest()
    return int.from_bytes(digest[:8], "big")


def held_out(data: DataConfig, given: Collection[Side] = ()) -> dict[int, float]:
    """Return the shares of the sides that are held out, by their index in SIDES, in its order.

    Args:
        given: sides that the data give, which have no share of the other records.
    """
    shares: dict[Side, float] = {"test": data.test_share, "validation": data.validation_share}
    return {SIDES.index(side): share for side, share in shares.items() if side not in given}


def sides_at(positions: NDArray[np.uint64], shares: Mapping[int, float]) -> NDArray[np.uint8]:
    """Return the side of each position, as its index in SIDES.

    Args:
        shares: as `held_out` returns them.
    """
    codes = np.array([*shares, TRAIN], dtype=np.uint8)
    borders = np.cumsum([*shares.values()])
    sides: NDArray[np.uint8] = codes[np.searchsorted(borders, positions / 2**64, side="right")]
    return sides


def split_digest(data: DataConfig, given: Mapping[Side, str]) -> str:
    """Return a digest of what determines the split.

    If two digests are equal, equal records are on equal sides, except for those that `labels.py`
    moves.

    Args:
        given: the sides that the data give, with the digests of their records.
    """
    shares = held_out(data, given)
    groups = {name: part.columns.group for name, part in data.parts.items()}
    return value_digest(
        [
            data.split_salt,
            *(shares.get(SIDES.index(side)) for side in ("validation", "test")),
            groups or data.columns.group,
            *([] if data.group_by_prompt else ["prompts"]),
            *([dict(given)] if given else []),
        ]
    )


_GROUPS: Final = 3
_NAMES: Final = 4
_CHARACTERS: Final = 80
_ABSENT: Final = {"", "na", "n/a", "<na>", "nan", "null", "none", "nil", "-1"}
"""How files without nulls write an absent value, and data sets an absent class."""


def near_equal_labels(labels: Iterable[str]) -> list[list[str]]:
    """Return a few labels, shortened, that differ only in case, white space or Unicode form."""
    groups = defaultdict(set)
    for label in labels:
        groups[folded(label)].add(label)
    several = [sorted(names) for names in groups.values() if len(names) > 1]
    return [[name[:_CHARACTERS] for name in names[:_NAMES]] for names in sorted(several)[:_GROUPS]]


def like_absent(labels: Iterable[str]) -> list[str]:
    """Return the labels that look like an absent value, such as NA."""
    return sorted(label for label in labels if label.strip().casefold() in _ABSENT)


# Put about the same share of each class on every side of the split.
#
# A record's position between 0 and 1 follows from its content or group and the salt, and the
# lowest positions are held out. In each class, the number of those stays within one or a tenth of
# what its share is, and every side has at least one. So where chance divides a class well enough,
# as it does a large one, its records are where the split alone puts them. Otherwise those next to
# the border change the side. Positions are in the order of test, validation, training: a record
# that leaves the test side because the data have grown gets to the validation side first.
#
# No rule that sees only the present data does better for small classes: if any three records of a
# class must be on three sides, a record that is held out among few is among the training records
# of many.

_SLACK = 0.1


def stratify(
    positions: NDArray[np.uint64],
    labels: NDArray[np.uint64],
    shares: Mapping[int, float],
    *,
    sets: bool = False,
) -> tuple[NDArray[np.uint8], NDArray[np.uint64]]:
    """Return the sides of records, and the classes with too few positions for all of them.

    Such classes are in training only. Records with one place stay together. Places with several
    classes, such as groups, are divided with their rarest class if it is that in all
    of its positions. The other positions are divided together.

    Args:
        shares: as for `sides_at`.
        sets: whether records have several classes, and are listed once for each. Then a class needs
            to be the rarest of as many positions as there are sides, for a division of its own: the
            shares of its other positions follow from those of rarer classes.
    """
    units, unit_of = np.unique(positions, return_inverse=True)
    order = np.lexsort((labels, unit_of))
    owners, labels_of = unit_of[order], labels[order]
    first = np.ones(len(order), dtype=bool)
    first[1:] = (np.diff(owners) != 0) | (labels_of[1:] != labels_of[:-1])
    owners, labels_of = owners[first], labels_of[first]
    names, class_of, counts = np.unique(labels_of, return_inverse=True, return_counts=True)
    rarest_first = np.lexsort((class_of, counts[class_of], owners))
    strata = class_of[rarest_first[np.unique(owners, return_index=True)[1]]]
    # With many classes in few groups, each class may be the rarest in one or two groups.
    enough = np.minimum(counts, len(shares) + 1) if sets else counts
    few = np.bincount(strata, minlength=len(names)) < enough
    strata[few[strata] & (counts[strata] > len(shares))] = len(names)
    by_stratum = np.argsort(strata, kind="stable")
    codes = np.array([*shares, TRAIN], dtype=np.uint8)
    sides = np.full(len(units), TRAIN, dtype=np.uint8)
    for members in np.split(by_stratum, np.cumsum(np.bincount(strata))[:-1]):
        borders = _borders(units[members] / 2**64, list(shares.values()))
        sides[members] = codes[np.searchsorted(borders, np.arange(len(members)), side="right")]
    # With groups, chance may still hold out every group of a class.
    trained = np.zeros(len(names), dtype=bool)
    trained[class_of[sides[owners] == TRAIN]] = True
    for missing in np.flatnonzero(~trained):
        sides[owners[class_of == missing].max()] = TRAIN
    return sides[unit_of], names[counts <= len(shares)]


def _borders(positions: NDArray[np.float64], shares: Sequence[float]) -> list[int]:
    """Return how many of a class's positions, which are sorted, are before the end of each held-out
    side.
    """
    count, before, borders = len(positions), 0, list[int]()
    if count <= len(shares):
        return [0] * len(shares)
    for later, share, end in zip(
        range(len(shares), 0, -1), shares, np.cumsum(shares).tolist(), strict=True
    ):
        wanted = share * count
        slack = max(1.0, _SLACK * wanted)
        size = int(np.searchsorted(positions, end)) - before
        size = min(max(size, math.ceil(wanted - slack), 1), math.floor(wanted + slack))
        before += min(size, count - before - later)
        borders.append(before)
    return borders

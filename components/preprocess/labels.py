"""Labels of classes: which look the same, and an equal share of each on every side."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from steadytrain.components.preprocess.split import TRAIN
from steadytrain.components.shared.class_names import folded

_GROUPS: Final = 3
_NAMES: Final = 4
_CHARACTERS: Final = 80
_ABSENT: Final = {"", "na", "n/a", "<na>", "nan", "null", "none", "nil", "-1"}
"""How files without nulls write an absent value, and data sets an absent class."""


def alike_labels(labels: Iterable[str]) -> list[list[str]]:
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
# A record's place between 0 and 1 follows from its content or group and the salt (`split.py`), and
# the lowest places are held out. In each class, the number of those stays within one or a tenth of
# what its share is, and every side has at least one. So where chance divides a class well enough,
# as it does a large one, its records are where the split alone puts them. Otherwise those next to
# the border change the side. Places are in the order of test, validation, training: a record that
# leaves the test side because the data have grown gets to the validation side first.
#
# No rule that sees only the present data does better for small classes: if any three records of a
# class must be on three sides, a record that is held out among few is among the training records
# of many.

_SLACK = 0.1


def stratify(
    places: NDArray[np.uint64],
    labels: NDArray[np.uint64],
    shares: Mapping[int, float],
    *,
    sets: bool = False,
) -> tuple[NDArray[np.uint8], NDArray[np.uint64]]:
    """Return the sides of records, and the classes with too few places for all of them.

    Such classes are in training only. Records with one place stay together. Places with several
    classes, such as groups, are divided with their rarest class if it is that in all
    of its places. The other places are divided together.

    Args:
        shares: as for `sides_at`.
        sets: whether records have several classes, and are listed once for each. Then a class needs
            to be the rarest of as many places as there are sides, for a division of its own: the
            shares of its other places follow from those of rarer classes.
    """
    units, unit_of = np.unique(places, return_inverse=True)
    order = np.lexsort((labels, unit_of))
    owners, labels_of = unit_of[order], labels[order]
    first = np.ones(len(order), dtype=bool)
    first[1:] = (np.diff(owners) != 0) | (labels_of[1:] != labels_of[:-1])
    owners, labels_of = owners[first], labels_of[first]
    names, class_of, counts = np.unique(labels_of, return_inverse=True, return_counts=True)
    rarest_first = np.lexsort((class_of, counts[class_of], owners))
    strata = class_of[rarest_first[np.unique(owners, return_index=True)[1]]]
    # Of many classes in few groups, each may be the rarest of one or two.
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
    """Return how many of a class's places, which are sorted, are before the end of each held-out
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

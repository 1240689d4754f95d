"""Find different labels that look the same, and those that look like none."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

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

"""The classes of several data sets that one model learns: `PART/label`, one part after another."""

from __future__ import annotations

from collections.abc import Sequence


def label_in(part: str, label: str) -> str:
    """Return the name of a part's class. No part has a slash in its name."""
    return f"{part}/{label}"


def part_of(label: str) -> str:
    """Return the part of a class that `label_in` named."""
    return label.partition("/")[0]


def in_part(label: str, part: str) -> bool:
    """Return whether a class is one of a part."""
    return label.startswith(label_in(part, ""))


def have_parts(labels: Sequence[str]) -> bool:
    """Return whether classes are those of parts."""
    return all("/" in label for label in labels)


def part_indices(labels: Sequence[str]) -> tuple[list[str], list[int]]:
    """Return the parts of classes, sorted, and for each class the index of its part."""
    owners = [part_of(label) for label in labels]
    names = sorted(set(owners))
    return names, [names.index(owner) for owner in owners]

"""The classes of several data sets that one model learns: `PART/label`, one part after another."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final
from unicodedata import normalize


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


_NUMBER: Final = re.compile(r"[+-]?[0-9]+")
_UNNAMED: Final = re.compile(r"LABEL_([0-9]+)")
"""What Transformers calls a class without a name."""
_CLASSES: Final = 20
"""With more whole numbers than this, they may be targets of a regression."""
_SHOWN: Final = 12
_CHARACTERS: Final = 80


def in_order(labels: Iterable[str]) -> list[str]:
    """Return labels sorted: as numbers if all are whole numbers, otherwise as text."""
    result = sorted(labels)
    if all(_NUMBER.fullmatch(label) for label in result):
        result.sort(key=int)
    return result


def counting(labels: Sequence[str]) -> str:
    """Return the question whether many labels are numbers to predict; "" if they are not."""
    # Tools that read a column with gaps write its whole numbers as 3.0.
    whole = (_NUMBER.fullmatch(label.removesuffix(".0")) for label in labels)
    if len(labels) <= _CLASSES or not all(whole):
        return ""
    return (
        f"{len(labels):,} different whole numbers: if they are measured or counted, and not names "
        "of classes, use data.task sequence_regression, which predicts the number"
    )


def folded(label: str) -> str:
    """Return a label without its case, white space and Unicode form."""
    return "".join(normalize("NFKC", label).casefold().split())


def named(labels: Sequence[str]) -> bool:
    """Return whether a model's classes have names of their own."""
    return not all(map(_UNNAMED.fullmatch, labels))


def indices_of(labels: Sequence[str], names: Sequence[str]) -> list[int] | None:
    """Return where each label is among other names of the same classes; None if they are not.

    Case, white space and Unicode form count only if labels differ in nothing else. LABEL_3 is 3.
    """
    ours, theirs = _keys(labels), _keys(names)
    if len(set(map(folded, ours))) == len(ours) and len(set(map(folded, theirs))) == len(theirs):
        ours, theirs = [*map(folded, ours)], [*map(folded, theirs)]
    if len(ours) != len(theirs) or set(ours) != set(theirs):
        return None
    places = {name: index for index, name in enumerate(theirs)}
    return [places[name] for name in ours]


def listed(labels: Sequence[str]) -> str:
    """Return labels as text, shortened: a few of many."""
    shown = [label[:_CHARACTERS] for label in labels[:_SHOWN]]
    return ", ".join(shown) + (f" and {len(labels) - _SHOWN:,} more" if labels[_SHOWN:] else "")


def _keys(names: Sequence[str]) -> list[str]:
    matches = [_UNNAMED.fullmatch(name) for name in names]
    return [item[1] for item in matches if item] if all(matches) else list(names)

"""Find different labels that look the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from steadytrain.components.shared.class_names import folded

_GROUPS: Final = 3
_NAMES: Final = 4
_CHARACTERS: Final = 80


def alike_labels(labels: Iterable[str]) -> list[list[str]]:
    """Return a few labels, shortened, that differ only in case, white space or Unicode form."""
    groups = defaultdict(set)
    for label in labels:
        groups[folded(label)].add(label)
    several = [sorted(names) for names in groups.values() if len(names) > 1]
    return [[name[:_CHARACTERS] for name in names[:_NAMES]] for names in sorted(several)[:_GROUPS]]

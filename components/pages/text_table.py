"""Tables as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def aligned(rows: Sequence[Sequence[str]], indent: str = "") -> Iterator[str]:
    """Yield the rows of a table as lines."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        columns = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        yield (indent + "  ".join(columns)).rstrip()

"""Pieces of Markdown that several reference pages share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; line breaks and bars within cells are made safe."""
    lines = [_row(heads), _row(["---"] * len(heads)), *map(_row, rows)]
    return "\n".join(lines) + "\n"


def code(text: object) -> str:
    """Text as code, without bars, which end a cell. Empty text stays empty."""
    plain = str(text).replace(" | ", " or ").replace("|", " or ")
    return f"`{plain}`" if plain else ""


def _row(cells: Sequence[str]) -> str:
    safe = (" ".join(cell.split()).replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(safe)} |"

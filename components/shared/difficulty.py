"""The column of prepared rows that orders a curriculum."""

from typing import Final

DIFFICULTY: Final = "_difficulty"
"""Its name in the shards. Tasks do not see it."""

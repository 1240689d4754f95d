"""Progressive sequence length: early steps cut documents into shorter ones.

From Li et al. 2022, "The Stability-Efficiency Tradeoff: Investigating Sequence Length Warmup for
Training GPT Models". The paper truncates each sequence and drops the rest. Here, a document of more
tokens than the current length becomes several documents of that length, as in Jin et al. 2023,
"GrowLength": every token stays in its row, so the tokens of a global batch, its shapes and its
memory are those of full length. Only the first token of each part is no target any more.

The length depends on the number of the global batch alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from steadytrain.components.shared.config.curriculum import CurriculumConfig
from steadytrain.components.tasks.base import Row
from steadytrain.components.train.loop.curriculum import share_at

LENGTHS: Final = 16
"""Different lengths at most: they are multiples of a sixteenth of the full one, rounded up."""


class SequenceLength:
    """The longest document of each global batch.

    Args:
        full: tokens of a row.
        batch: rows in a global batch.
        steps: of the curriculum.
    """

    def __init__(self, config: CurriculumConfig, full: int, *, batch: int, steps: int) -> None:
        self.config, self.full, self.batch, self.steps = config, full, batch, steps

    def at(self, number: int) -> int:
        """Return the most tokens of a document in a global batch, at least 2."""
        share = math.ceil(share_at(self.config, number / self.steps) * LENGTHS)
        return max(2, math.ceil(share * self.full / LENGTHS))

    def cut(self, row: Row, place: int) -> Row:
        """Return a packed row with its documents cut.

        Args:
            place: of the row in the endless stream of training rows.
        """
        longest = self.at(place // self.batch)
        lengths = [part for length in row["lengths"] for part in _parts(int(length), longest)]
        return {**row, "lengths": lengths}


def _parts(length: int, longest: int) -> Iterator[int]:
    while length > longest:
        yield longest
        length -= longest
    yield length

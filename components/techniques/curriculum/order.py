"""The order of a curriculum: each global batch is drawn from the easiest records.

The share of records grows with the step by a pacing function (Platanios et al. 2019,
"Competence-based Curriculum Learning"; Hacohen and Weinshall 2019, "On the Power of Curriculum
Learning in Training Deep Networks"). A batch has no record twice. After the curriculum, training
follows the ordinary order from its beginning, so that each epoch has every record once.

Which records make up a batch depends on the seed and on the number of the batch alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from steadytrain.components.shared.arrow_files import DIFFICULTY
from steadytrain.components.shared.errors import BadInput, DataError
from steadytrain.components.techniques.base import Row
from steadytrain.components.techniques.curriculum import CurriculumConfig
from steadytrain.components.techniques.order import Order, RowColumns

_STREAM = 0x63757272
"""Keeps the draws apart from those of the ordinary order, which also begin with the seed."""
LENGTHS: Final = 16
"""Different lengths at most: they are multiples of a sixteenth of the full one, rounded up."""


class Curriculum:
    """Implements `Order`.

    Args:
        order: what follows after the curriculum.
        difficulty: (rows,), of each row.
        seed: equal seeds draw equal batches.
        batch: rows in a global batch.
        steps: of the curriculum.
    """

    def __init__(
        self,
        order: Order,
        difficulty: npt.NDArray[np.float64],
        config: CurriculumConfig,
        *,
        seed: int,
        batch: int,
        steps: int,
    ) -> None:
        self.order, self.config, self.seed, self.batch = order, config, seed, batch
        self.steps = steps
        self._easiest_first = np.argsort(difficulty, kind="stable")
        self._number, self._drawn = -1, np.empty(0, dtype=np.int64)

    def take(self, position: int, count: int) -> Sequence[int]:
        """Return the indices of `count` rows of the stream, starting at `position`."""
        end = self.steps * self.batch
        early = [self._at(index) for index in range(position, min(position + count, end))]
        missing = count - len(early)
        if not missing:
            return early
        return [*early, *self.order.take(max(0, position - end), missing)]

    def _at(self, position: int) -> int:
        number, offset = divmod(position, self.batch)
        if number != self._number:
            self._number, self._drawn = number, self._draw(number)
        return int(self._drawn[offset])

    def _draw(self, number: int) -> npt.NDArray[np.int64]:
        rows = len(self._easiest_first)
        known = math.ceil(share_at(self.config, number / self.steps) * rows)
        known = min(rows, max(known, self.batch))
        random = np.random.default_rng([self.seed, _STREAM, number])
        # Only a data set smaller than a batch has rows twice in it.
        places = random.choice(known, self.batch, replace=known < self.batch)
        return self._easiest_first[places]


def share_at(config: CurriculumConfig, progress: float) -> float:
    """Return the share of records that a step draws from.

    Args:
        progress: share of the curriculum's steps that are done, from 0 to 1.
    """
    start = config.start
    if progress >= 1:
        return 1.0
    if config.pacing == "step":
        return start
    if config.pacing == "linear":
        return start + (1 - start) * progress
    return math.sqrt(start**2 + (1 - start**2) * progress)


def difficulty_of(
    rows: RowColumns, config: CurriculumConfig, padded: str
) -> npt.NDArray[np.float64]:
    """Return the difficulty of each row.

    Args:
        padded: the column that the task pads; "" if it pads none.

    Raises:
        BadInput: the task says nothing about the length of a row.
        DataError: the data were prepared without the column.
    """
    if config.by == "length":
        if not padded:
            raise BadInput(
                "training.curriculum.by = 'length': the task does not say which column it pads",
                remedy="set `padded` in the task, or use by: column",
            )
        return rows.lengths(padded).astype(np.float64)
    if DIFFICULTY not in rows.columns:
        raise DataError(
            f"the data were prepared without the column {config.column!r} "
            "(training.curriculum.column)",
            remedy="run the preprocess step again",
        )
    return rows.values(DIFFICULTY)


class SequenceLength:
    """The longest document of each global batch: early steps cut documents into shorter ones.

    From Li et al. 2022, "The Stability-Efficiency Tradeoff: Investigating Sequence Length Warmup
    for Training GPT Models". The paper truncates each sequence and drops the rest. Here, a document
    of more tokens than the current length becomes several documents of that length, as in Jin et
    al. 2023, "GrowLength": every token stays in its row, so the tokens of a global batch, its
    shapes and its memory are those of full length. Only the first token of each part is no target
    any more.

    The length depends on the number of the global batch alone.

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

    def cut(self, row: Row, position: int) -> Row:
        """Return a packed row with its documents cut.

        Args:
            position: of the row in the endless stream of training rows.
        """
        longest = self.at(position // self.batch)
        lengths = [part for length in row["lengths"] for part in _parts(int(length), longest)]
        return {**row, "lengths": lengths}


def _parts(length: int, longest: int) -> Iterator[int]:
    while length > longest:
        yield longest
        length -= longest
    yield length

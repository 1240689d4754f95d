"""A curriculum: short rows before long ones."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class ShortestFirst:
    """Every epoch goes from the shortest row to the longest; packed rows stay in file order."""

    def __init__(
        self, rows: int, seed: int, lengths: npt.NDArray[np.int32] | None, batch: int
    ) -> None:
        self.rows = np.arange(rows) if lengths is None else np.argsort(lengths, kind="stable")

    def take(self, position: int, count: int) -> Sequence[int]:
        return [int(self.rows[at % len(self.rows)]) for at in range(position, position + count)]

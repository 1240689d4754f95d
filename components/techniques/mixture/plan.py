"""What a mixture draws: planned and realized shares, and when a data set is used up.

The rows of a data set are one range of the training side. Rows differ in tokens, so a data set is
drawn in proportion to its share divided by the mean tokens of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.records import SourceRecord
from steadytrain.components.techniques import order
from steadytrain.components.techniques.mixture import Drawn, MixtureConfig
from steadytrain.components.techniques.order import Mixture, largest_remainder, spread


class MixturePlan:
    """The mixture of a training side.

    Args:
        sources: in the order of their rows. Each has rows.

    Raises:
        BadInput: the share of a data set is so small that it would never be drawn.
    """

    def __init__(self, sources: Sequence[SourceRecord], config: MixtureConfig) -> None:
        self.sources, self.config = sources, config
        self.planned = config.shares({one.name: one.tokens for one in sources})
        self.means = np.array([one.tokens / one.rows for one in sources])
        raw = np.array([self.planned[one.name] for one in sources]) / self.means
        self.row_shares: npt.NDArray[np.float64] = raw / raw.sum()
        self.counts = largest_remainder(self.row_shares, order.BLOCK)
        for source, count in zip(sources, self.counts, strict=True):
            if not count:
                raise BadInput(
                    f"training.mixture.by = {config.by!r}: the part {source.name!r} has a share "
                    f"below 1 in {order.BLOCK} rows",
                    remedy="give it a larger share, raise the temperature, or leave it out",
                )
        self._block = spread(self.counts)

    def order(self, seed: int) -> Mixture:
        """Return the order that draws it."""
        parts = np.repeat(np.arange(len(self.sources)), [one.rows for one in self.sources])
        names = [one.name for one in self.sources]
        return Mixture(parts, self.row_shares, seed, names=names, even=True)

    def epoch(self) -> int:
        """Return the rows of an epoch: those of all data sets, or those of the token budgets."""
        if self.config.by == "tokens":
            budgets = np.array([self.config.tokens[one.name] for one in self.sources])
            return max(1, round(float((budgets / self.means).sum())))
        return sum(one.rows for one in self.sources)

    def limit(self) -> tuple[int, str]:
        """Return how many rows are drawn before one comes again, and of which data set it is."""
        places = []
        for part, source in enumerate(self.sources):
            block, inner = divmod(source.rows, int(self.counts[part]))
            within = int(np.flatnonzero(self._block == part)[inner])
            places.append((block * order.BLOCK + within, source.name))
        return min(places)

    def rows(self, places: int) -> npt.NDArray[np.int64]:
        """Return the rows drawn of each data set, (sources), in the first places of the order."""
        blocks, remainder = divmod(places, order.BLOCK)
        result: npt.NDArray[np.int64] = blocks * self.counts + np.bincount(
            self._block[:remainder], minlength=len(self.counts)
        )
        return result

    def drawn(self, places: int) -> list[Drawn]:
        """Return what the first places of the order draw of each data set."""
        rows = self.rows(places)
        tokens = rows * self.means
        total = max(1.0, float(tokens.sum()))
        return [
            Drawn(
                one.name,
                self.planned[one.name],
                float(tokens[part]) / total,
                int(rows[part]),
                float(tokens[part]),
                float(rows[part]) / one.rows,
            )
            for part, one in enumerate(self.sources)
        ]

    def repeated(self, places: int) -> list[str]:
        """Return a sentence for each data set that is gone through more than once."""
        return [
            f"training.mixture: the part {one.name!r} has {source.rows:,} rows and is used up, so "
            f"that they are repeated: {one.passes:.2f} passes in {places:,} rows"
            for one, source in zip(self.drawn(places), self.sources, strict=True)
            if one.passes > 1
        ]

"""Hide tokens of a text, for a masked language model to predict.

From Devlin et al. 2019, "BERT", section 3.1: of the chosen tokens, 80 % become the mask token, 10 %
a random token, and 10 % stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from steadytrain.components.techniques.base import IGNORED

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Masking:
    """How tokens are masked.

    probability: of a token that is not special.
    mask: the mask token. special: tokens that are never chosen.
    vocabulary: number of tokens that a random one is drawn from.
    """

    probability: float
    mask: int
    special: tuple[int, ...]
    vocabulary: int

    @classmethod
    def by(cls, tokenizer: Any, probability: float) -> Masking:
        special = tuple(sorted(tokenizer.all_special_ids))
        return cls(probability, tokenizer.mask_token_id, special, len(tokenizer))

    def apply(self, ids: npt.ArrayLike, *seed: int) -> tuple[Tokens, Tokens]:
        """Return what the model gets and what it predicts, both (length,).

        Args:
            ids: (length,).
            seed: all that the choice depends on, besides the number of tokens.

        Returns:
            The tokens with the chosen ones hidden; and the chosen ones, with IGNORED elsewhere.
        """
        given = np.asarray(ids, dtype=np.int64)
        random = np.random.default_rng(seed)
        chance, fate = random.random((2, len(given)))
        other = random.integers(self.vocabulary, size=len(given))
        chosen = (chance < self.probability) & ~np.isin(given, self.special)
        hidden = np.where(fate < 0.8, self.mask, np.where(fate < 0.9, other, given))
        return np.where(chosen, hidden, given), np.where(chosen, given, IGNORED)

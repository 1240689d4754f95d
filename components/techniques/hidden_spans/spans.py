"""Hide spans of a text, and have a model write them after the rest.

From Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer" (T5), section 3.1.4: a sentinel stands for each span, and the spans follow, each after
its sentinel. Both parts are one sequence, as in Tay et al. 2022, "UL2", for models without an
encoder. Nothing here needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]


class Corrupted(NamedTuple):
    """A text in tokens.

    targets: 1 if the token is predicted from those before it.
    """

    input_ids: list[int]
    targets: list[int]


@dataclass(frozen=True)
class SpanCorruption:
    """How spans are hidden.

    density: share of the tokens that are hidden.
    span: mean number of tokens in a span.
    ends: tokens before the text and after the spans.
    sentinels: tokens that stand for the spans, in this order.
    """

    density: float
    span: float
    ends: tuple[int, int]
    sentinels: tuple[int, ...]

    def counts(self, length: int) -> tuple[int, int]:
        """Return how many of the tokens of a text are hidden, and in how many spans."""
        hidden = min(max(round(length * self.density), 1), length - 1)
        spans = max(round(hidden / self.span), 1)
        return hidden, min(spans, hidden, length - hidden, len(self.sentinels))

    def room(self, length: int) -> int:
        """Return how many tokens of a text fit into a sequence of `length` tokens."""
        tokens = length - len(self.ends) - 2
        while tokens + 2 * self.counts(tokens)[1] + len(self.ends) > length:
            tokens -= 1
        return tokens

    def apply(self, ids: npt.ArrayLike, length: int, *seed: int) -> Corrupted:
        """Return the text without its hidden spans, and then these. They are the targets.

        Also targets are the tokens between and after them: the first sentinel is given.

        Args:
            ids: (tokens,), at least `sentinels.LEAST`, without the ends of a text.
            length: most tokens of the result. Of a longer text, a random part is taken.
            seed: all that the choice depends on, besides the number of tokens.
        """
        given, random = np.asarray(ids, dtype=np.int64), np.random.default_rng(seed)
        excess = len(given) - self.room(length)
        if excess > 0:
            start = random.integers(excess + 1)
            given = given[start : start + len(given) - excess]
        hidden, spans = self.counts(len(given))
        kept = _parts(len(given) - hidden, spans, random)
        lengths = np.stack([kept, _parts(hidden, spans, random)], 1).ravel()
        pieces = np.split(given, lengths.cumsum()[:-1])
        text, answer = [self.ends[0]], list[int]()
        for sentinel, visible, span in zip(
            self.sentinels, pieces[0::2], pieces[1::2], strict=False
        ):
            text += [*visible.tolist(), sentinel]
            answer += [sentinel, *span.tolist()]
        answer.append(self.ends[1])
        return Corrupted([*text, *answer], [0] * (len(text) + 1) + [1] * (len(answer) - 1))


def _parts(total: int, count: int, random: np.random.Generator) -> Tokens:
    """Return the lengths of a random division into parts of at least one token, (count,)."""
    cuts = np.sort(random.choice(total - 1, count - 1, replace=False)) + 1
    return np.diff(cuts, prepend=0, append=total)

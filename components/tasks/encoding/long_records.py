"""Fit chats and pairs that are longer than a row: cut them, drop them, or learn them in windows."""

from __future__ import annotations

from collections.abc import Iterator

from steadytrain.components.shared.config.data import LongRecords
from steadytrain.components.tasks.encoding.fields import Defect
from steadytrain.components.tasks.encoding.tokens import Encoded


def rows_of(encoded: Encoded, length: int, how: LongRecords | None) -> list[Encoded]:
    """Return the rows of a chat with at least one target.

    Args:
        length: tokens in a row.
        how: `data.long_records`.

    Raises:
        Defect: the chat is left out.
    """
    tokens = len(encoded.input_ids)
    if tokens <= length:
        return [encoded]
    limit = f"data.sequence_length = {length:,}"
    if how == "drop":
        raise Defect("dropped_as_long", f"it has {tokens:,} tokens, more than {limit}")
    if how == "window":
        return list(_windows(encoded, length))
    row = truncated(encoded, length)
    if not any(row.targets):
        prompt = encoded.targets.index(1)
        raise Defect("cut_to_nothing", f"its prompt alone has {prompt:,} tokens, and {limit}")
    return [row]


def truncated(encoded: Encoded, length: int) -> Encoded:
    """Return the first tokens of a document."""
    return Encoded(encoded.input_ids[:length], encoded.targets[:length])


def _windows(encoded: Encoded, length: int) -> Iterator[Encoded]:
    """Yield windows in which each target is predicted once.

    A window begins at most half of its length before its first target, so an answer keeps the end
    of its prompt, and what continues an answer keeps the text before it. The last window has more
    of that, since nothing comes after it.
    """
    end = len(encoded.targets) - encoded.targets[::-1].index(1)
    done = 0
    while done < end:
        first = encoded.targets.index(1, done)
        start = max(0, min(first - length // 2, end - length)) if first >= length else 0
        stop = min(start + length, end)
        targets = [0] * (first - start) + encoded.targets[first:stop]
        yield Encoded(encoded.input_ids[start:stop], targets)
        done = stop
